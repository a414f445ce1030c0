"""`python -m mcore_convert`, where the console script is not installed."""

from mcore_convert.cli import main

main()
