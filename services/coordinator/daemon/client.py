"""Calls a coordinator daemon, and reconnects when the connection breaks."""

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from lockstep.coordinator.v1 import coordinator_pb2 as pb
from lockstep.coordinator.v1 import coordinator_pb2_grpc
from lockstep.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceServicer as CoordinatorService

from services.common.config.run import Config
from services.common.errors import DeadlineExceeded, LockstepError, Unavailable
from services.common.rpc.address import require_secure
from services.common.rpc.client import Answer, Client, Method, Request
from services.common.rpc.tls import LOCAL, Transport
from services.coordinator.fleet.launch import Addresses
from services.coordinator.runs.replicas import ListedReplica

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 30.0
# Timeout of a stream, which is then reopened, so that the daemon does not hold resources forever for a client that
# disappeared. Keepalive detects a dead peer much earlier.
_STREAM_TIMEOUT_S = 3600.0
# How long to wait for a restarted daemon.
_RECONNECT_TIMEOUT_S = 60.0


@dataclass
class _Seen:
    """The newest versions whose events a watcher has."""

    step: int = 0
    evaluation: int = -1


class Coordinator:
    """Calls the daemon at `address`; use it as an async context manager. Raises the daemon's errors unchanged.

    Raises:
        InvalidInput: The address is not HOST:PORT, or the connection would be plaintext over a network.
    """

    _client: Client

    def __init__(self, address: str, transport: Transport = LOCAL):
        require_secure(address, transport, field="--coordinator")
        self.address, self._transport = address, transport

    async def __aenter__(self) -> "Coordinator":
        self._client = Client(self.address, coordinator_pb2_grpc.CoordinatorServiceStub, self._transport)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def start(self, config: Config, given: Addresses) -> pb.Run:
        """Starts a run in the coordinator's runs directory; `config.runs_dir` must be unset or that directory."""
        addresses = pb.ServiceAddresses(rollout=given.rollout, reward=given.reward, **given.trainers)
        request = pb.StartRunRequest(config_json=config.model_dump_json(), addresses=addresses)
        return (await self._call(CoordinatorService.StartRun, request)).run

    async def get(self, name: str) -> pb.Run:
        """Returns the state of a run."""
        return (await self._call(CoordinatorService.GetRun, pb.GetRunRequest(name=name))).run

    async def all(self) -> list[pb.Run]:
        """Returns the state of all runs."""
        return list((await self._call(CoordinatorService.ListRuns, pb.ListRunsRequest())).runs)

    async def stop(self, name: str, *, now: bool) -> pb.Run:
        """Asks a run to stop. Returns without waiting for its end."""
        return (await self._call(CoordinatorService.StopRun, pb.StopRunRequest(name=name, now=now))).run

    async def replicas(self, name: str) -> list[ListedReplica]:
        """Returns the replicas of a run in progress."""
        answer = await self._call(CoordinatorService.ListReplicas, pb.ListReplicasRequest(name=name))
        return list(map(_listed, answer.replicas))

    async def change_replicas(self, name: str, add: Sequence[str], remove: Sequence[str]) -> list[ListedReplica]:
        """Adds and removes replicas of a run in progress. Returns all of them."""
        request = pb.ChangeReplicasRequest(name=name, add=add, remove=remove)
        return list(map(_listed, (await self._call(CoordinatorService.ChangeReplicas, request)).replicas))

    async def watch(self, name: str) -> AsyncIterator[pb.WatchRunResponse]:
        """Yields each event of a run once, from its first step to its end. Reconnects if the connection breaks."""
        await self.get(name)  # raises immediately if the name or address is wrong
        seen = _Seen()
        while True:
            try:
                async for answer in self._events_after(name, seen):
                    yield answer
                return
            except (Unavailable, DeadlineExceeded) as error:
                await self._wait_until_back(name, error)

    async def _events_after(self, name: str, seen: _Seen) -> AsyncIterator[pb.WatchRunResponse]:
        """Yields each event after those of `seen`, and adds it to `seen`."""
        request = pb.WatchRunRequest(name=name, after_version=seen.step)
        async for answer in self._client.stream(CoordinatorService.WatchRun, request, timeout_s=_STREAM_TIMEOUT_S):
            event = answer.WhichOneof("event")
            if event == "step":
                seen.step = answer.step.version
            elif event == "evaluation":
                if answer.evaluation.version <= seen.evaluation:
                    continue
                seen.evaluation = answer.evaluation.version
            yield answer

    async def read_log(self, name: str, service: str, *, follow: bool) -> AsyncIterator[bytes]:
        """Yields a run's log from the beginning; with `follow`, until the run ends. Reconnects like `watch`."""
        await self.get(name)
        offset = 0
        while True:
            request = pb.ReadLogRequest(name=name, service=service, offset=offset, follow=follow)
            try:
                async for part in self._client.stream(CoordinatorService.ReadLog, request, timeout_s=_STREAM_TIMEOUT_S):
                    offset = part.next_offset
                    yield part.data
                return
            except (Unavailable, DeadlineExceeded) as error:
                await self._wait_until_back(name, error)

    async def _call(self, method: Method[Request, Answer], request: Request) -> Answer:
        return await self._client.call(method, request, timeout_s=_CALL_TIMEOUT_S)

    async def _wait_until_back(self, name: str, error: LockstepError) -> None:
        """Waits until the daemon answers again.

        Raises:
            Unavailable: The daemon did not answer in time.
        """
        log.info("%s; waiting for the coordinator to come back", error.message)
        request = pb.GetRunRequest(name=name)
        try:
            await self._client.call(
                CoordinatorService.GetRun, request, timeout_s=_RECONNECT_TIMEOUT_S, wait_for_ready=True
            )
        except (Unavailable, DeadlineExceeded) as timeout:
            raise Unavailable(
                f"lost the coordinator at {self.address}, and it did not come back within {_RECONNECT_TIMEOUT_S:g} s"
            ) from timeout


def _listed(replica: pb.Replica) -> ListedReplica:
    version = replica.version if replica.HasField("version") else None
    return ListedReplica(replica.address, version, replica.is_wanted, replica.note, replica.is_unused)
