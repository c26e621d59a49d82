"""The command line, `composer-dist`."""
