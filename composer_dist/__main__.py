"""`python -m composer_dist` is `composer-dist`."""

from composer_dist.cli import main

main()
