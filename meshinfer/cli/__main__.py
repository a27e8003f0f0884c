"""`python -m meshinfer.cli`, for processes that know their interpreter but not its scripts."""

from meshinfer.cli import main

main()
