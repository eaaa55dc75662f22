"""Makes `python -m vitrail` the same as the command `vitrail`."""

from vitrail.cli.main import main

main()
