"""The commands of `composer-dist`, a file each."""
