"""`python -m composer_dist` is `composer-dist`."""

from composer_dist.cli.main import main

main()
