"""Where checkpoints go."""
