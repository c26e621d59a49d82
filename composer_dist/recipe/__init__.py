"""One YAML file becomes a Trainer."""
