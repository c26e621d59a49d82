"""The file formats of checkpoints."""
