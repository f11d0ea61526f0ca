"""`python -m services.coordinator` is the `lockstep` command."""

from services.coordinator.cli import main

main()
