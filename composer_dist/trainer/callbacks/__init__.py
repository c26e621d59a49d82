"""Callbacks: code that runs at the Trainer's events."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
