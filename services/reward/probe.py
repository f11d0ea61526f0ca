"""Checks that this host can run programs in a sandbox: `python -m services.reward.probe`.

The exit code is 0 if it can; otherwise it is 1, and stderr says why.
"""

import asyncio
import sys

from services.reward.errors import ScoringError
from services.reward.sandbox import Limits, Sandbox

_LIMITS = Limits(timeout_s=10.0, memory_bytes=1 << 30, disk_bytes=16 << 20, max_processes=8, max_output_bytes=1 << 20)


async def _probe() -> None:
    sandbox = Sandbox(_LIMITS)
    try:
        await sandbox.open()
    finally:
        sandbox.close()


def main() -> None:
    """Creates one sandbox and exits."""
    try:
        asyncio.run(_probe())
    except ScoringError as error:
        sys.exit(error.detail)


if __name__ == "__main__":
    main()
