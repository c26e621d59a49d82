"""What a user asks for: frozen dataclasses, resolved once."""
