"""Imports the functions that a config names and checks their arguments. `lockstep doctor` starts it as a process."""

import json
import sys

from services.common.errors import InvalidInput
from services.common.import_path import require_function


def main() -> None:
    """Imports what stdin names: JSON that maps config keys to path, names of positional arguments, and kwargs.

    Exits with the reason if one is not there or does not take its arguments.
    """
    for field, (path, args, kwargs) in json.load(sys.stdin).items():
        try:
            require_function(path, args, kwargs, field=field)
        except InvalidInput as error:
            sys.exit(error.message)


if __name__ == "__main__":
    main()
