"""`python -m services.coordinator` is the `lockstep` command."""

from services.coordinator.cli.main import main

main()
