"""Models exported for transformers and peft."""
