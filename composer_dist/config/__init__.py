"""The user's configuration: frozen dataclasses, resolved once."""
