"""What the files of a checkpoint look like."""
