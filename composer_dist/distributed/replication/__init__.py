"""Replicated data parallelism: DDP in place."""
