"""`python -m foreroute.cli`, the same as `foreroute`."""

from foreroute.cli.main import main

main()
