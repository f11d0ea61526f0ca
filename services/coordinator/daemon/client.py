"""Calls a coordinator daemon, and reconnects when the connection breaks."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence

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

    async def start(self, config: Config, addresses: Addresses) -> pb.Run:
        """Starts a run in the coordinator's runs directory; `config.runs_dir` must be unset or that directory."""
        services = pb.ServiceAddresses(rollout=addresses.rollout, reward=addresses.reward, **addresses.trainers)
        request = pb.StartRunRequest(config_json=config.model_dump_json(), addresses=services)
        return (await self._call(CoordinatorService.StartRun, request)).run

    async def get(self, name: str) -> pb.Run:
        return (await self._call(CoordinatorService.GetRun, pb.GetRunRequest(name=name))).run

    async def all(self) -> list[pb.Run]:
        return list((await self._call(CoordinatorService.ListRuns, pb.ListRunsRequest())).runs)

    async def stop(self, name: str, *, now: bool) -> pb.Run:
        """Asks a run to stop. Returns without waiting for its end."""
        return (await self._call(CoordinatorService.StopRun, pb.StopRunRequest(name=name, now=now))).run

    async def replicas(self, name: str) -> list[ListedReplica]:
        answer = await self._call(CoordinatorService.ListReplicas, pb.ListReplicasRequest(name=name))
        return list(map(_listed, answer.replicas))

    async def change_replicas(self, name: str, add: Sequence[str], remove: Sequence[str]) -> list[ListedReplica]:
        """Adds and removes replicas of a run in progress. Returns all of them."""
        request = pb.ChangeReplicasRequest(name=name, add=add, remove=remove)
        return list(map(_listed, (await self._call(CoordinatorService.ChangeReplicas, request)).replicas))

    async def watch(self, name: str) -> AsyncIterator[pb.WatchRunResponse]:
        """Yields each event of a run once, from its first step to its end. Reconnects if the connection breaks."""
        step, evaluation = 0, -1  # the newest versions whose events were yielded

        def events() -> AsyncIterator[pb.WatchRunResponse]:
            request = pb.WatchRunRequest(name=name, after_version=step)
            return self._client.stream(CoordinatorService.WatchRun, request, timeout_s=_STREAM_TIMEOUT_S)

        async for answer in self._reconnecting(name, events):
            if answer.HasField("step"):
                step = answer.step.version
            elif answer.HasField("evaluation"):
                # After a reconnect those of the newest step come again: they follow its event.
                if answer.evaluation.version <= evaluation:
                    continue
                evaluation = answer.evaluation.version
            yield answer

    async def read_log(self, name: str, service: str, *, follow: bool) -> AsyncIterator[bytes]:
        """Yields a run's log from the beginning; with `follow`, until the run ends. Reconnects like `watch`."""
        offset = 0

        def parts() -> AsyncIterator[pb.ReadLogResponse]:
            request = pb.ReadLogRequest(name=name, service=service, offset=offset, follow=follow)
            return self._client.stream(CoordinatorService.ReadLog, request, timeout_s=_STREAM_TIMEOUT_S)

        async for part in self._reconnecting(name, parts):
            offset = part.next_offset
            yield part.data

    async def _reconnecting(self, name: str, stream: Callable[[], AsyncIterator[Answer]]) -> AsyncIterator[Answer]:
        """Yields what `stream` does, which goes on where it was when it is called again after a lost connection."""
        await self.get(name)  # raises immediately if the name or address is wrong
        while True:
            try:
                async for answer in stream():
                    yield answer
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
        request, limit_s = pb.GetRunRequest(name=name), _RECONNECT_TIMEOUT_S
        try:
            await self._client.call(CoordinatorService.GetRun, request, timeout_s=limit_s, wait_for_ready=True)
        except (Unavailable, DeadlineExceeded) as timeout:
            raise Unavailable(
                f"lost the coordinator at {self.address}, and it did not come back within {limit_s:g} s"
            ) from timeout


def _listed(replica: pb.Replica) -> ListedReplica:
    version = replica.version if replica.HasField("version") else None
    return ListedReplica(replica.address, version, replica.is_wanted, replica.note, replica.is_unused)
