"""Fine-tuning in phases."""
