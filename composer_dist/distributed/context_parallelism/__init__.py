"""Context parallelism: each rank has a part of the sequence."""
