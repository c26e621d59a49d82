"""Between forward and step: gradients, averaging, norms, full parameters for a while."""
