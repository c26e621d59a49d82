"""The file formats of checkpoints; `files/checkpoint_format.py` describes their `checkpoint.json`."""
