"""The file formats of checkpoints; `files/manifest.py` describes `checkpoint.json`, which all of them share."""
