"""Every tensor gets its value: from rank 0, from disk or from an initializer."""
