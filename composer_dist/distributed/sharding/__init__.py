"""FSDP2: which modules are units, and how they are sharded."""
