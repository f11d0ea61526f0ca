"""A coordinator daemon in this process, with fake services that train nothing, immediately or when the test allows."""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from lockstep.coordinator.v1 import coordinator_pb2 as pb
from lockstep.coordinator.v1 import coordinator_pb2_grpc
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.config.run import Config
from services.common.errors import LockstepError
from services.common.model_card import read_model_card
from services.common.rpc.client import Client
from services.common.rpc.server import Server
from services.coordinator.daemon.client import Coordinator
from services.coordinator.daemon.history import ToRunLog
from services.coordinator.daemon.runs import NAME, CoordinatorServicer, Runs
from services.coordinator.fleet.launch import Addresses
from tests.coordinator.fake_services import FakeReplica, FakeReward
from tests.support import PATIENCE_S, ROOT, free_port, until

MODEL = ROOT / "deploy" / "quickstart" / "model"
NUM_STEPS = 3


class FakeTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """A trainer that only counts. Train raises `error`; OpenRun waits for `may_open`, each batch for a permit."""

    def __init__(self) -> None:
        self.version = 0
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.permits = asyncio.Semaphore(1000)
        self.training = asyncio.Event()
        self.error: LockstepError | None = None
        self.closed: list[str] = []

    def hold_after(self, num_steps: int) -> None:
        """Lets only `num_steps` batches through."""
        self.permits = asyncio.Semaphore(num_steps)

    def let_go(self) -> None:
        """Lets the held batches and all later ones through."""
        for _ in range(1000):
            self.permits.release()

    async def GetInfo(self, request: trainer_pb2.GetInfoRequest, context: Any) -> trainer_pb2.GetInfoResponse:
        return trainer_pb2.GetInfoResponse(num_ranks=1)

    async def OpenRun(self, request: trainer_pb2.OpenRunRequest, context: Any) -> trainer_pb2.OpenRunResponse:
        await self.may_open.wait()
        self.version = 0
        if request.checkpoint_path:
            self.version = json.loads((Path(request.checkpoint_path) / "manifest.json").read_text())["state"]["version"]
        card = read_model_card(request.model_path)
        return trainer_pb2.OpenRunResponse(version=self.version, model_card=card, weight_backend="gloo")

    async def AcquireMemory(self, request: Any, context: Any) -> trainer_pb2.AcquireMemoryResponse:
        return trainer_pb2.AcquireMemoryResponse()

    async def CloseRun(self, request: trainer_pb2.CloseRunRequest, context: Any) -> trainer_pb2.CloseRunResponse:
        self.closed.append(request.run_id)
        return trainer_pb2.CloseRunResponse()

    async def JoinWeightGroup(self, request: Any, context: Any) -> trainer_pb2.JoinWeightGroupResponse:
        return trainer_pb2.JoinWeightGroupResponse(plan_digest="plan")

    async def SendWeights(self, request: trainer_pb2.SendWeightsRequest, context: Any) -> Any:
        return trainer_pb2.SendWeightsResponse(stamp=PolicyStamp(version=request.version, digest="digest"))

    async def Train(self, requests: AsyncIterator[Any], context: Any) -> trainer_pb2.TrainResponse:
        async for _ in requests:
            pass
        if self.error is not None:
            raise self.error
        self.training.set()
        await self.permits.acquire()
        self.training.clear()
        self.version += 1
        metrics = {"entropy": 1.0, "grad_norm": 2.0, "logprob_diff_max": 0.0, "loss": float(self.version)}
        return trainer_pb2.TrainResponse(version=self.version, metrics=metrics)

    async def SaveCheckpoint(self, request: trainer_pb2.SaveCheckpointRequest, context: Any) -> Any:
        manifest = Path(request.path) / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"state": {"version": request.version}}))
        digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
        return trainer_pb2.SaveCheckpointResponse(manifest_digest=digest)

    async def ExportHuggingFace(self, request: trainer_pb2.ExportHuggingFaceRequest, context: Any) -> Any:
        Path(request.path).mkdir()
        return trainer_pb2.ExportHuggingFaceResponse()


@dataclass
class Fakes:
    """The fake services of one run."""

    trainer: FakeTrainer = field(default_factory=FakeTrainer)
    replica: FakeReplica = field(default_factory=FakeReplica)
    reward: FakeReward = field(default_factory=lambda: FakeReward(set()))
    server: Server = field(default_factory=Server)
    given: Addresses = field(default_factory=Addresses)

    async def start(self) -> None:
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self.reward, self.server.grpc)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self.trainer, self.server.grpc)
        port = await self.server.start("127.0.0.1:0", ["lockstep.trainer.v1.TrainerService"])
        await self.replica.start()
        here = f"127.0.0.1:{port}"
        self.given = Addresses((self.replica.address,), reward=(here,), trainer=here)

    async def end(self) -> None:
        await self.replica.die()
        await self.server.grpc.stop(0)


@contextlib.asynccontextmanager
async def fake_services() -> AsyncIterator[Fakes]:
    fakes = Fakes()
    await fakes.start()
    try:
        yield fakes
    finally:
        await fakes.end()


def run_settings(directory: Path, **changes: Any) -> dict[str, Any]:
    """Returns the settings of a run of NUM_STEPS, with its data in `directory`."""
    if not (directory / "train.parquet").exists():  # a run may be reading it
        rows = {"prompt": [f"{index}+1=" for index in range(8)], "answer": [str(index + 1) for index in range(8)]}
        pq.write_table(pa.table(rows), directory / "train.parquet")
    return {
        "name": "run",
        "model": str(MODEL),
        "num_steps": NUM_STEPS,
        "data": {"train": str(directory / "train.parquet"), "prompts_per_step": 2, "max_prompt_tokens": 16},
        "rollout": {"completions_per_prompt": 2, "max_model_len": 64, "sampling": {"max_tokens": 8}},
        "reward": {"scorers": [{"kind": "exact"}]},
        "trainer": {"max_tokens_per_microbatch": 256},
        "checkpoint": {"save_freq": 1},
        **changes,
    }


class Daemon:
    """Serves `runs` on one port, which stays the same after a restart."""

    def __init__(self, directory: Path):
        self.directory, self.runs = directory, Runs(directory / "runs")
        self._server: Server | None = None
        self.address = f"127.0.0.1:{free_port()}"

    async def start(self) -> None:
        self._server = Server()
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(CoordinatorServicer(self.runs), self._server.grpc)
        await self._server.start(self.address, [NAME])
        self.client = Client(self.address, coordinator_pb2_grpc.CoordinatorServiceStub)
        self.coordinator = await Coordinator(self.address).__aenter__()

    async def break_off(self) -> None:
        """Makes all calls fail."""
        assert self._server
        await self._server.grpc.stop(0)

    async def end(self) -> None:
        for run in list(self.runs.running.values()):
            run.stop(now=True)
            await run.ended.wait()
        await self.client.close()
        await self.coordinator.__aexit__()
        await self.break_off()

    async def run(self, fakes: Fakes, **changes: Any) -> pb.Run:
        """Starts a run with `fakes`."""
        config = Config(**run_settings(self.directory, **changes))
        return await self.coordinator.start(config, fakes.given)

    async def watched(self, name: str = "run") -> list[pb.WatchRunResponse]:
        """Returns all events that a watcher gets until the run ends."""
        async with asyncio.timeout(PATIENCE_S):
            return [answer async for answer in self.coordinator.watch(name)]

    def watcher(self, name: str = "run") -> "Watcher":
        """Starts to listen to the run."""
        return Watcher(self.coordinator.watch(name))


class Watcher:
    """Listens to a run and keeps all events."""

    def __init__(self, answers: AsyncIterator[pb.WatchRunResponse]):
        self.heard: list[pb.WatchRunResponse] = []
        self._listening = asyncio.create_task(self._listen(answers))

    async def _listen(self, answers: AsyncIterator[pb.WatchRunResponse]) -> None:
        async for answer in answers:
            self.heard.append(answer)

    async def until(self, condition: Callable[[pb.WatchRunResponse], object]) -> None:
        """Waits until `condition` holds for one of the events so far."""
        await until(lambda: self._listening.done() or any(map(condition, self.heard)))
        assert any(map(condition, self.heard)), self.heard

    async def end(self) -> list[pb.WatchRunResponse]:
        """Waits for the end of the run. Returns all events."""
        async with asyncio.timeout(PATIENCE_S):
            await self._listening
        return self.heard


@contextlib.asynccontextmanager
async def daemon(directory: Path) -> AsyncIterator[Daemon]:
    daemon, to_run_log = Daemon(directory), ToRunLog()
    logging.getLogger().addHandler(to_run_log)
    await daemon.start()
    try:
        yield daemon
    finally:
        await daemon.end()
        logging.getLogger().removeHandler(to_run_log)


def steps(answers: list[pb.WatchRunResponse]) -> list[int]:
    return [answer.step.version for answer in answers if answer.HasField("step")]
