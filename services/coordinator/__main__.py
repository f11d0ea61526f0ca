"""Runs the `lockstep` command as `python -m services.coordinator`."""

from services.coordinator.cli.main import main

main()
