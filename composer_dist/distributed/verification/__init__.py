"""Proof, after the fact, that a prepared model is still the function that it was."""
