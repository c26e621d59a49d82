"""Verification of prepared models."""
