"""Keeps the status with which a service ends a call while the client is still sending.

Reason: grpc.aio replaces that status by INTERNAL, "Internal error from Core", if a message cannot be sent because the
service has ended the call (https://github.com/grpc/grpc/issues/36066). The typed reason would be lost with it. Seen
with grpcio 1.85.1.
"""

from functools import wraps
from importlib import import_module
from typing import Any

_call: Any = import_module("grpc.aio._call")  # has no types

# How gRPC's error begins if the message was accepted and then not sent. Then the status follows. Otherwise it may not.
_NOT_SENT = 'Failed "execute_batch"'


class _Call:
    """gRPC's own call, except that a message that was not sent does not set the status."""

    def __init__(self, call: Any):
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def set_internal_error(self, error: str) -> None:
        if not error.startswith(_NOT_SENT):
            self._call.set_internal_error(error)


def keep_early_status() -> None:
    """Changes grpc.aio for this process: a call that the service ends early has the status that the service gave."""
    write = _call._StreamRequestMixin._write

    @wraps(write)
    async def keeping_status(self: Any, request: object) -> None:
        if not isinstance(self._cython_call, _Call):
            self._cython_call = _Call(self._cython_call)
        await write(self, request)

    _call._StreamRequestMixin._write = keeping_status
