"""The device mesh, and how a tensor is laid out over it."""
