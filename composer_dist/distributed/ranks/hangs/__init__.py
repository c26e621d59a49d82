"""Ranks that make no progress are noticed, and the run ends with a report of where each rank stands."""
