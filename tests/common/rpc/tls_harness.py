"""Runs a server with every method of every service, and makes certificates to call it.

Each method answers with an empty message.
"""

import asyncio
import datetime
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from lockstep.coordinator.v1 import coordinator_pb2
from lockstep.reward.v1 import agent_pb2, environment_pb2, reward_pb2
from lockstep.rollout.v1 import rollout_pb2
from lockstep.trainer.v1 import trainer_pb2

from services.common.compat.grpc import keep_early_status
from services.common.rpc.server import Server
from services.common.rpc.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Credentials, Role
from services.coordinator.cli.certs import init, issue
from tests.support import PATIENCE_S

keep_early_status()

HOST = "127.0.0.1"
FILES = (rollout_pb2, trainer_pb2, reward_pb2, environment_pb2, agent_pb2, coordinator_pb2)
SERVICES = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
METHODS = {f"/{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods}
UNLISTED = "/lockstep.reward.v1.RewardService/AddedYesterday"


@dataclass
class Certificates:
    """Creates an authority and the certificates that it issues, all below `root`."""

    root: Path
    ca: Path = field(init=False)

    def __post_init__(self) -> None:
        self.ca = self.root / "ca"
        init(self.ca)

    def of(self, role: Role, *hosts: str, name: str = "", valid_s: float = 3600) -> Path:
        """Returns the directory with credentials of `role`, which are issued by the first call for it.

        They are for `hosts`. If none is given, they are for 127.0.0.1 or, if the role is the operator's, for no host.
        """
        out = self.root / (name or role)
        if not out.exists():
            validity = datetime.timedelta(seconds=valid_s)
            issue(self.ca, role, hosts or ([] if role is Role.OPERATOR else [HOST]), out, validity=validity)
        return out


class AnyMethod(grpc.GenericRpcHandler):
    """Answers every method of METHODS, and UNLISTED, which no proto has."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        path = handler_call_details.method
        method = METHODS.get(path) or (path == UNLISTED and METHODS[UNLISTED.replace("AddedYesterday", "Score")])
        if not method:
            return None
        kind = _KINDS[method.client_streaming, method.server_streaming]
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        behavior = _stream(response) if method.server_streaming else _unary(response)
        return make(behavior, request.FromString, response.SerializeToString)


def _unary(response: type) -> Any:
    async def behavior(request: Any, context: Any) -> Any:
        return response()

    return behavior


def _stream(response: type) -> Any:
    async def behavior(request: Any, context: Any) -> AsyncIterator[Any]:
        yield response()

    return behavior


_KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


async def serve(directory: Path | None, port: int = 0) -> tuple[Server, str]:
    """Serves all methods with the credentials in `directory` or in plaintext; returns the server and its address."""
    server = Server(tls=directory and Credentials(directory))
    server.grpc.add_generic_rpc_handlers((AnyMethod(),))
    return server, f"{HOST}:{await server.start(f'{HOST}:{port}', [])}"


def channel(address: str, directory: Path | None, *, ca: Path | None = None) -> grpc.aio.Channel:
    """Returns a channel of gRPC itself, with the certificate in `directory` or with none.

    The server's certificate must be of the authority `ca`; by default, of the one in `directory`.
    """
    root = ((ca or directory) / CA_FILE).read_bytes()
    pair = [(directory / name).read_bytes() for name in (KEY_FILE, CERTIFICATE_FILE)] if directory else [None, None]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root, *pair))


async def call(to: grpc.aio.Channel, path: str) -> grpc.aio.AioRpcError | None:
    """Calls a method with an empty message, and returns the error or None."""
    method: MethodDescriptor = METHODS.get(path) or METHODS["/lockstep.reward.v1.RewardService/Score"]
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    make = getattr(to, _KINDS[method.client_streaming, method.server_streaming])
    function = make(path, request.SerializeToString, response.FromString)
    calling = function(_once(request()) if method.client_streaming else request(), timeout=PATIENCE_S)
    try:
        if method.server_streaming:
            assert [answer async for answer in calling] == [response()]
        else:
            assert await calling == response()
    except grpc.aio.AioRpcError as error:
        return error
    return None


def _once(message: Any) -> Iterator[Any]:
    yield message


async def calls(to: grpc.aio.Channel) -> dict[str, grpc.aio.AioRpcError | None]:
    """Calls every method, and returns the error or None for each."""
    return dict(zip(METHODS, await asyncio.gather(*(call(to, path) for path in METHODS)), strict=True))
