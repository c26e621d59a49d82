"""The kinds of contents in a checkpoint: models, optimizers and other values."""
