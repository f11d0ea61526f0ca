"""Imports the functions that a config names, as services do. `lockstep doctor` starts it as a process."""

import json
import sys

from services.common.errors import InvalidInput
from services.common.import_path import load_function


def main() -> None:
    """Imports what stdin names, a JSON object of config keys and paths. Exits with the reason if one is not there."""
    for field, path in json.load(sys.stdin).items():
        try:
            load_function(path, field=field)
        except InvalidInput as error:
            sys.exit(error.message)


if __name__ == "__main__":
    main()
