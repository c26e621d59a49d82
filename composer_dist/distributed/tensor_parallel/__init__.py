"""Tensor parallelism: matrices cut among ranks."""
