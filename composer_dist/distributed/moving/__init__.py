"""Tensors between ranks: from whole to parts, and back."""
