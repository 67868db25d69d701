"""`python -m paged_backend.cli`, where the console script is not installed."""

from paged_backend.cli import main

main()
