"""The file formats of checkpoints; `files/manifest.py` describes their `checkpoint.json`."""
