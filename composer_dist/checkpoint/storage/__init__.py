"""The places of checkpoints: local directories and URLs."""
