"""Makes directories for Unix sockets. The path of a socket has at most 107 bytes, however long that of TMPDIR is."""

import os
import socket
import tempfile

from services.common.errors import InvalidInput

# The longest name of a socket that is made in such a directory: vLLM's are 36 characters.
_NAME = "s" * 36
# Not first the user's runtime directory: it is removed when the user logs out.
_ELSEWHERE = ("/tmp", "/var/tmp", "/dev/shm", "/run")


def socket_directory() -> "tempfile.TemporaryDirectory[str]":
    """Makes a directory that only this user can enter and in which sockets can be made.

    It is in the directory for temporary files or, if sockets cannot be made there because its path is too long for
    example, in /tmp or another place with a short path.

    Raises:
        InvalidInput: Sockets cannot be made anywhere.
    """
    places = (tempfile.gettempdir(), os.environ.get("TMPDIR"), *_ELSEWHERE, os.environ.get("XDG_RUNTIME_DIR"))
    refused: list[str] = []
    for place in dict.fromkeys(filter(None, places)):
        try:
            directory = tempfile.TemporaryDirectory(prefix="lockstep-", dir=place)
        except OSError as error:
            refused.append(f"{place}: {error.strerror or error}")
            continue
        try:
            _try(os.path.join(directory.name, _NAME))
        except OSError as error:
            directory.cleanup()
            refused.append(f"{place}: {error.strerror or error}")
        else:
            return directory
    raise InvalidInput(
        "TMPDIR: an engine's processes meet at Unix sockets, and none can be made here; set TMPDIR to a directory that "
        f"this user can write to, with a path of at most 50 characters ({'; '.join(refused)})",
        field="TMPDIR",
    )


def _try(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(path)
    os.unlink(path)
