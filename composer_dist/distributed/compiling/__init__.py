"""torch.compile by block, and float8."""
