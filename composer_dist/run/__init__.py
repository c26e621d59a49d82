"""Runs from configurations: what `composer-dist train` does, step by step."""
