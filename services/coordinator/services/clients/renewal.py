"""Renews the lease of an open run while its coordinator works (services/common/rpc/fence.py)."""

import asyncio
import logging

from google.protobuf.message import Message

from services.common.errors import LockstepError
from services.common.rpc.client import Client, Method, Request

log = logging.getLogger(__name__)

# Of four calls in each lease, three may be lost.
_PER_LEASE = 4


class Renewal:
    """Calls GetInfo on one service as often as its lease requires, from `begin` to `end`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def begin(self, client: Client, method: Method[Request, Message], request: Request, lease_s: float) -> None:
        """Begins the calls, if it has not begun yet; `method` and `request` are the service's GetInfo."""
        self._task = self._task or asyncio.create_task(self._renew(client, method, request, lease_s / _PER_LEASE))

    async def end(self) -> None:
        """Ends the calls."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _renew(self, client: Client, method: Method[Request, Message], request: Request, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await client.call(method, request, timeout_s=every_s)
            except LockstepError as error:  # calls that need the service notice it themselves
                log.info("the lease at %s could not be renewed: %s", client.address, error.message)
