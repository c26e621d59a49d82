"""Importing it makes Python look for garbage seldom: a quarter of the tests' time went into that."""

import gc

gc.set_threshold(20_000, 20, 50)
