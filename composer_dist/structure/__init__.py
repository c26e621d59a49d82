"""A model as it is: its modules, tensors, names, ties and blocks."""
