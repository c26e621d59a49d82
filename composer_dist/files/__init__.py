"""Weight files: their tensors and names, and reading, checking and writing slices of them."""
