"""Optimizers follow their parameters."""
