"""Provides workers that do as the test says, as the ranks of one trainer, and a servicer over them."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.errors import Aborted, PreconditionFailed, Reason
from services.common.rpc.client import Client
from services.coordinator.clients.trainer import whole_batch
from services.trainer.ranks.calls import Message, Ranks, rank_command
from tests.support import PATIENCE_S, make_batch

DIGEST = "0" * 32


class FakeWorker:
    """Stands in for the real worker, which runs torch, is slow, and cannot be stopped at a chosen moment."""

    def __init__(self, rank: int):
        self.rank = rank
        self.calls: list[str] = []
        self.minibatches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.writers = threading.Event()
        self.write_error: Exception | None = None
        self.join_error: Exception | None = None
        self.block_error: Exception | None = None
        self.added, self.dropped = threading.Event(), threading.Event()
        self.crash_error: BaseException = ZeroDivisionError("boom")

    @rank_command
    def echo(self, *, value: Any, own: Any = None, frames: list[bytes] = ()) -> Message:
        return Message({"rank": self.rank, "value": value, "own": own}, [*frames, b"from the rank"])

    @rank_command
    def refuse(self) -> None:
        if self.rank == 1:
            raise PreconditionFailed("not now", reason=Reason.NOT_JOINED, field="f")

    @rank_command
    def give_up(self) -> None:
        if self.rank == 0:
            raise Aborted("another member gave up")
        raise PreconditionFailed("the cause")

    @rank_command
    def refuse_while_another_hangs(self) -> None:
        self.refuse()
        self.gate.wait()

    @rank_command
    def refuse_at_the_gate(self) -> None:
        self.entered.set()
        self.gate.wait()
        self.refuse()

    @rank_command
    def crash(self) -> None:
        if self.rank == 1:
            raise self.crash_error
        self.gate.wait()

    @rank_command
    def answer_with_no_json(self) -> Message:
        return Message({"value": object()})

    @rank_command
    def open(self, **_: Any) -> Message:
        return Message({"data_rank": self.rank, "pads_rows": False}, [b""])

    @rank_command
    def begin_batch(self, **_: Any) -> None:
        self.calls.append("begin")

    @rank_command
    def add_block(self, *, minibatches: list[tuple[int, list[int]]], **_: Any) -> None:
        if self.block_error is not None:
            raise self.block_error
        self.calls.append("add")
        self.minibatches += [number for number, _ in minibatches]
        self.added.set()

    @rank_command
    def apply_batch(self, **_: Any) -> Message:
        self.entered.set()
        self.gate.wait()
        self.calls.append("apply")
        return Message({"metrics": {"loss": 0.5}})

    @rank_command
    def drop_batch(self, *, role: str) -> None:
        self.calls.append("drop")
        self.dropped.set()

    @rank_command
    def save(self, *, state: dict[str, Any], **_: Any) -> Message:
        self.calls.append(f"save {state['version']}")
        return Message({})  # the save goes on in the background

    def saved(self) -> dict[str, Any]:
        """Waits until the test ends the background save; returns its answer or raises `write_error`."""
        self.entered.set()
        self.writers.wait()
        if self.write_error is not None:
            raise self.write_error
        return {"num_bytes": 7, "manifest_digest": "m"}

    def kill_epoch(self) -> None:
        pass

    @rank_command
    def close(self) -> None:
        self.calls.append("close")

    @rank_command
    def join(self, **_: Any) -> Message:
        self.entered.set()
        self.gate.wait()
        if self.join_error is not None:
            raise self.join_error
        return Message({"plan_digest": "p"})

    @rank_command
    def send(self, **_: Any) -> Message:
        self.calls.append("send")
        return Message({"digest": DIGEST, "num_bytes": 1, "duration_s": 0.1, "cost": {}})


class Crew:
    def __init__(self) -> None:
        self.failures: list[str] = []
        self.workers = [FakeWorker(rank) for rank in range(2)]
        self.ranks = Ranks(2, "127.0.0.1", self.failures.append)

    def close_gates(self) -> None:
        for worker in self.workers:
            worker.gate.clear()
            worker.entered.clear()

    def open_gates(self) -> None:
        for worker in self.workers:
            worker.gate.set()
            worker.writers.set()


class Service:
    """Calls the real servicer and server, which are over fake workers."""

    def __init__(self, crew: Crew, client: Client, model: Path):
        self.crew, self.client, self.model = crew, client, model

    async def train(self, spoil: Callable[[pb.TrainRequest], pb.TrainRequest] = lambda m: m) -> pb.TrainResponse:
        stamp = PolicyStamp(version=0, digest=DIGEST)
        header = pb.TrainHeader(expected_stamp=stamp, batch_id="b", temperature=1.0)
        requests = (spoil(message) async for message in whole_batch(header, make_batch(2, 2, stamp)))
        return await self.client.call(TrainerService.Train, requests, timeout_s=PATIENCE_S)

    async def send(self, *, timeout_s: float = PATIENCE_S) -> PolicyStamp:
        request = pb.SendWeightsRequest(epoch=1, version=0)
        return (await self.client.call(TrainerService.SendWeights, request, timeout_s=timeout_s)).stamp

    def save(self, path: Path, **fields: Any) -> asyncio.Task[pb.SaveCheckpointResponse]:
        request = pb.SaveCheckpointRequest(path=str(path), **fields)
        return asyncio.create_task(self.client.call(TrainerService.SaveCheckpoint, request, timeout_s=PATIENCE_S))

    async def open(self, run_id: str, role: int = pb.ROLE_POLICY, config_json: str = "{}") -> pb.OpenRunResponse:
        request = pb.OpenRunRequest(
            run_id=run_id, config_json=config_json, model_path=str(self.model), bucket_bytes=1024
        )
        request.role = role
        return await self.client.call(TrainerService.OpenRun, request, timeout_s=PATIENCE_S)

    async def version(self) -> int:
        return (await self.client.call(TrainerService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S)).stamp.version
