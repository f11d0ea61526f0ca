"""What a fork runs for the tests: `python -m MODULE ARGUMENTS` in a directory, or the `lockstep` command."""

import os
import sys
import tempfile
from importlib import import_module

from services.common.forks import FORKABLE
from tests.e2e.forked.imports import lend

COMMAND = "services.coordinator.cli.main"


def preload() -> None:
    """Imports what the command and the reward service need for a run, before they are forked."""
    for name in (COMMAND, *(f"services.coordinator.{part}" for part in ("rl.session", "sft", "replay.session"))):
        import_module(name)
    for name in ("servicer", "agents.servicer", "environments.servicer", "metrics"):
        import_module(f"services.reward.{name}")


def main() -> None:
    """Takes the directory, a file for the standard output (or "" for that of the errors), a module and its
    arguments."""
    _, directory, output, module, *arguments = sys.argv
    os.chdir(directory)
    tempfile.tempdir = None  # TMPDIR may be another than that of the imports
    if output:
        with open(output, "wb") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
    sys.argv = [module, *arguments]
    if module == COMMAND:
        lend()
    import_module(f"{module}.__main__" if module in FORKABLE else module).main()
