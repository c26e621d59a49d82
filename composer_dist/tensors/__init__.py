"""One tensor: its parts, its bytes and what it is made of. Nothing here needs a process group."""
