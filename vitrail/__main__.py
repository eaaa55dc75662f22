"""`python -m vitrail` is the command `vitrail`."""

from vitrail.cli.main import main

main()
