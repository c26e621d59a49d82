"""A model's modules, tensors, names, ties and blocks."""
