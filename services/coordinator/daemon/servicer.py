"""Implements CoordinatorService, the gRPC interface for the CLI and dashboards."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path

from lockstep.coordinator.v1 import coordinator_pb2 as pb
from lockstep.coordinator.v1 import coordinator_pb2_grpc

from services.common.config.load import parse_json
from services.common.config.run import Config
from services.common.rpc.address import require_secure
from services.common.rpc.server import NO_RUN, Context, service_info
from services.common.rpc.tls import LOCAL, Transport
from services.coordinator.daemon.history import is_news, read_events
from services.coordinator.daemon.logs import read_log
from services.coordinator.daemon.runs import Runs, with_state
from services.coordinator.doctor.inputs import check_weights
from services.coordinator.fleet.launch import Addresses
from services.coordinator.planning.plan import check_model
from services.coordinator.runs.replicas import ListedReplica, change_replicas, listed_replicas

NAME = "lockstep.coordinator.v1.CoordinatorService"


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves `runs` over gRPC; the runs call their services over `transport`."""

    def __init__(self, runs: Runs, transport: Transport = LOCAL):
        self._runs, self._transport = runs, transport

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        state = "ending" if self._runs.is_ending else "serving"
        info = service_info("coordinator", state, run=NO_RUN, libraries=("grpcio", "pyarrow"))
        return pb.GetInfoResponse(info=info, runs_dir=str(self._runs.directory), num_running=len(self._runs.running))

    async def StartRun(self, request: pb.StartRunRequest, context: Context) -> pb.StartRunResponse:
        config, addresses = parse_json(Config, request.config_json), _addresses(request.addresses, self._transport)
        addresses.require_own(config)
        await asyncio.to_thread(check_model, config)
        await asyncio.to_thread(check_weights, config, addresses)
        return pb.StartRunResponse(run=self._runs.start(config, addresses))

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=await self._runs.get(request.name))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=await self._runs.all())

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        in_progress = self._runs.running.get(request.name)
        if in_progress is not None:
            async for answer in in_progress.events(request.after_version):
                yield answer
            return
        run = await self._runs.get(request.name)
        for event in await asyncio.to_thread(read_events, Path(run.run_dir)):
            if is_news(event, request.after_version):
                yield with_state(event, run)
        yield pb.WatchRunResponse(run=run)

    async def StopRun(self, request: pb.StopRunRequest, context: Context) -> pb.StopRunResponse:
        return pb.StopRunResponse(run=await self._runs.stop(request.name, now=request.now))

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Context) -> pb.ListReplicasResponse:
        listed = await asyncio.to_thread(listed_replicas, await self._directory(request.name))
        return pb.ListReplicasResponse(replicas=map(_replica, listed))

    async def ChangeReplicas(self, request: pb.ChangeReplicasRequest, context: Context) -> pb.ChangeReplicasResponse:
        for address in request.add:
            require_secure(address, self._transport, field="add")
        directory = await self._directory(request.name)
        listed = await asyncio.to_thread(change_replicas, directory, add=request.add, remove=request.remove)
        return pb.ChangeReplicasResponse(replicas=map(_replica, listed))

    async def _directory(self, name: str) -> Path:
        return Path((await self._runs.get(name)).run_dir)

    async def ReadLog(self, request: pb.ReadLogRequest, context: Context) -> AsyncIterator[pb.ReadLogResponse]:
        run, in_progress = await self._runs.get(request.name), self._runs.running.get(request.name)
        until = in_progress.ended if in_progress is not None and request.follow else None
        logs = Path(run.run_dir) / "logs"
        async with aclosing(read_log(logs, request.service or "coordinator", request.offset, until)) as answers:
            async for answer in answers:
                yield answer


def _replica(listed: ListedReplica) -> pb.Replica:
    return pb.Replica(**asdict(listed))  # the fields have the same names


def _addresses(message: pb.ServiceAddresses, transport: Transport) -> Addresses:
    """Converts addresses. Raises InvalidInput if one is not HOST:PORT or would use plaintext over a network."""
    rollout, reward = tuple(message.rollout), tuple(message.reward)
    trainers = message.trainer, message.reference, message.critic, message.teacher
    addresses = Addresses(rollout, reward, *trainers, transport)
    for name, address in addresses.named:
        require_secure(address, transport, field=f"addresses.{name}")
    return addresses
