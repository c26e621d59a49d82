"""Batches: loaded, ordered, packed, cut, and resumed."""
