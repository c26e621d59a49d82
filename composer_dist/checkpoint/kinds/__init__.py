"""What a checkpoint holds: models, optimizers and other values."""
