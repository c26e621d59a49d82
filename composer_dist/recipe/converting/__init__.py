"""Configurations of other libraries become ours: `composer-dist convert-config`."""
