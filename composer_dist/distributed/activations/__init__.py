"""Activations recomputed or offloaded."""
