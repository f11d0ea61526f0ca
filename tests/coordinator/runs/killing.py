"""Kills a coordinator of this process at a chosen point, while its services go on.

The services are a real trainer servicer over a rank that only counts, and fake replicas and scorers.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lockstep.reward.v1 import environment_pb2_grpc, reward_pb2_grpc
from lockstep.rollout.v1 import rollout_pb2
from lockstep.trainer.v1 import trainer_pb2_grpc

from services.common import batches
from services.common.batches import content_sha256
from services.common.config.run import Config
from services.common.rpc.client import Client
from services.common.rpc.server import Server
from services.common.weights.store import ServedStore
from services.coordinator.clients.trainer import BlockStream
from services.coordinator.fleet.launch import Addresses
from services.coordinator.observe.frontend import Outcome
from services.coordinator.observe.reporters import JsonLines
from services.coordinator.rl.session import run_session
from services.coordinator.runs.ledger import Ledger
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.run import Run
from services.trainer.backend import Role
from services.trainer.checkpoint import manifest as checkpoint
from services.trainer.ranks.calls import Message, Ranks, rank_command
from services.trainer.servicer import NAME, TrainerServicer
from tests.coordinator.daemon.harness import MODEL
from tests.coordinator.fake_environment import FakeEnvironment, OpensEnvironment
from tests.coordinator.fake_services import FakeReplica, FakeReward
from tests.support import PATIENCE_S
from tests.trainer.rank_threads import following


class CountingRank:
    """Trains nothing, but keeps the versions that it was asked to train, and the blocks of each applied batch."""

    def __init__(self) -> None:
        self.trained: list[int] = []
        self.blocks: list[list[str]] = []
        self._added: list[str] = []
        self.critic_trained: list[int] = []

    @rank_command
    def open(self, **_: Any) -> Message:
        return Message({"data_rank": 0, "pads_rows": False}, [b""])

    @rank_command
    def acquire_memory(self, **_: Any) -> Message:
        return Message({}, [b""])

    @rank_command
    def forward(self, *, frames: Sequence[bytes], **_: Any) -> Message:
        values = [[0.5] * len(tokens) for tokens in batches.decode(frames)["tokens"].to_pylist()]
        answer = pa.table({"values": pa.array(values, pa.list_(pa.float32()))})
        return Message({}, list(batches.encode(answer)))

    def _train(self, version: int, role: str) -> Message:
        if role == Role.CRITIC:
            self.critic_trained.append(version)
            return Message({"metrics": {"critic_loss": float(version)}})
        self.trained.append(version)
        metrics = {"entropy": 1.0, "grad_norm": 2.0, "loss": float(version)}
        metrics |= {"logprob_diff_max": 0.0, "logprob_diff_ess": 0.75}
        return Message({"metrics": metrics})

    @rank_command
    def begin_batch(self, *, role: str, is_one_block: bool, **_: Any) -> None:
        self._is_one_block = is_one_block
        self._added = []

    @rank_command
    def add_block(self, *, role: str, minibatches: list[tuple[int, list[int]]], frames: Sequence[bytes]) -> None:
        if self._is_one_block:
            return
        ((minibatch, packs),) = minibatches
        self._added.append(f"{minibatch} {packs} {content_sha256(batches.decode(frames)).hex()}")

    @rank_command
    def apply_batch(self, *, role: str, totals: list[dict[str, int]], version: int) -> Message:
        if not self._is_one_block:
            self.blocks.append([*self._added, f"{totals}"])
        return self._train(version, role)

    @rank_command
    def drop_batch(self, *, role: str) -> None:
        self._added = []

    @rank_command
    def save(self, *, path: str, state: dict[str, Any], **_: Any) -> Message:
        num_bytes, digest = checkpoint.finish(Path(path), checkpoint.TrainState(**state))
        return Message({"num_bytes": num_bytes, "manifest_digest": digest})

    @rank_command
    def export(self, *, path: str, files: Mapping[str, str]) -> Message:
        checkpoint.staging(Path(path)).rename(path)
        return Message({})

    @rank_command
    def join(self, **_: Any) -> Message:
        return Message({"plan_digest": "plan"})

    @rank_command
    def send(self, *, version: int, **_: Any) -> Message:
        return Message({"digest": f"digest {version}", "num_bytes": 1, "duration_s": 0.1, "cost": {}})

    @rank_command
    def close(self) -> None:
        pass

    def kill_epoch(self) -> None:
        pass

    def saved(self) -> dict[str, Any]:
        raise AssertionError("nothing is saved in the background")


class _Replica(FakeReplica):
    """Receives what CountingRank sends."""

    async def ReceiveWeights(self, request: rollout_pb2.ReceiveWeightsRequest, context: Any) -> Any:
        return rollout_pb2.ReceiveWeightsResponse(digest=f"digest {request.version}")


class Killed(BaseException):
    """Ends the coordinator; nothing catches it."""


class Deadline:
    """Counts what the coordinator does, and kills it after `num_events`: from then on it can do nothing more."""

    def __init__(self) -> None:
        self.num_events, self.events = 1 << 30, []

    def before(self) -> None:
        """Raises Killed if `num_events` have happened; called before anything that has an effect."""
        if len(self.events) >= self.num_events:
            raise Killed

    def after(self, event: str) -> None:
        """Records `event`, and raises Killed if it was the last; called once `event` has had its effect."""
        self.events.append(event)
        self.before()

    def restart(self, num_events: int = 1 << 30) -> None:
        self.num_events, self.events = num_events, []


@pytest.fixture
def deadline(monkeypatch: pytest.MonkeyPatch) -> Deadline:
    """Provides a deadline that watches the ledger, metrics.jsonl and every call of the coordinator in this process."""
    deadline = Deadline()
    record, transaction, call, line = Ledger.record, Ledger.transaction, Client.call, JsonLines.step
    parts = {name: getattr(BlockStream, name) for name in ("send", "commit")}

    def recording(self: Ledger, kind: str, version: int | None = None, **body: Any) -> int:
        deadline.before()
        number = record(self, kind, version, **body)  # type: ignore[arg-type]
        if not self._db.in_transaction:
            deadline.after(f"ledger {kind} {version}")
        return number

    @contextlib.contextmanager
    def in_transaction(self: Ledger) -> Iterator[None]:
        deadline.before()
        with transaction(self):
            yield
        deadline.after("batch recorded")

    async def calling(self: Client, method: Any, *args: Any, **options: Any) -> Any:
        deadline.before()
        answer = await call(self, method, *args, **options)
        deadline.after(method.__name__)
        return answer

    def writing(self: JsonLines, version: int, metrics: dict[str, float]) -> None:
        deadline.before()
        line(self, version, metrics)
        deadline.after(f"line {version}")

    def streaming(name: str) -> Callable[[BlockStream, pa.Table], None]:
        def sending(self: BlockStream, samples: pa.Table) -> None:
            deadline.before()
            parts[name](self, samples)
            deadline.after(f"{name} of a block" if name == "send" else name)

        return sending

    for name in parts:
        monkeypatch.setattr(BlockStream, name, streaming(name))
    monkeypatch.setattr(Ledger, "record", recording)
    monkeypatch.setattr(Ledger, "transaction", in_transaction)
    monkeypatch.setattr(Client, "call", calling)
    for name in ("step", "evaluation"):
        monkeypatch.setattr(JsonLines, name, writing)
    return deadline


class _NoFrontend:
    console = None

    def start(self) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def begin(self, run: Run, version: int) -> Reporter:
        return Reporter()


class Services:
    """Holds services that outlive the coordinator."""

    def __init__(self, rank: CountingRank, given: Addresses):
        self.rank, self.given = rank, given

    async def run(self, config: Config) -> Outcome:
        """Runs a coordinator to its end."""
        async with asyncio.timeout(PATIENCE_S):
            return await run_session(config, self.given, _NoFrontend())


@contextlib.asynccontextmanager
async def surviving_services(environment: FakeEnvironment | None = None) -> AsyncIterator[Services]:
    rank, failures, server, replica = CountingRank(), [], Server(), _Replica()
    ranks = Ranks(1, "127.0.0.1", failures.append)
    servicer = TrainerServicer(ranks, rank, ServedStore("127.0.0.1"))  # type: ignore[arg-type]
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server.grpc)
    reward = OpensEnvironment(set()) if environment else FakeReward(set())
    reward_pb2_grpc.add_RewardServiceServicer_to_server(reward, server.grpc)
    if environment:
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(environment, server.grpc)
    here = f"127.0.0.1:{await server.start('127.0.0.1:0', [NAME])}"
    await replica.start()
    async with following(ranks, rank):
        await ranks.wait_for_all()
        try:
            yield Services(rank, Addresses((replica.address,), reward=(here,), trainer=here))
        finally:
            await replica.die()
            await server.grpc.stop(0)
    assert failures == []


def make_run(directory: Path, num_steps: int, **changes: Any) -> Config:
    """Returns the config of a run that is saved and evaluated after every step; its files are in `directory`."""
    model = directory / "model"
    model.mkdir()
    for file in MODEL.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"vocab_size": 64}))  # FakeReplica samples below 50
    rows = {"prompt": [f"{index}+1=" for index in range(8)], "answer": [str(index + 1) for index in range(8)]}
    pq.write_table(pa.table(rows), directory / "rows.parquet")
    pq.write_table(pa.table(rows).slice(0, 1), directory / "held_out.parquet")
    return Config(
        name="run",
        runs_dir=directory,
        model=str(model),
        num_steps=num_steps,
        data={
            "train": str(directory / "rows.parquet"),
            "eval": {"test": str(directory / "held_out.parquet")},
            "prompts_per_step": 2,
            "max_prompt_tokens": 6,
        },
        rollout={"completions_per_prompt": 2, "max_model_len": 64, "sampling": {"max_tokens": 8}},
        reward={"scorers": [{"kind": "exact"}]},
        trainer={"max_tokens_per_microbatch": 256, **changes.pop("trainer", {})},
        evaluation={"eval_freq": 1},
        checkpoint={"save_freq": 1, "max_ckpts_to_keep": 10, "max_critic_ckpts_to_keep": 10},
        **changes,
    )  # type: ignore[arg-type]


def metrics_lines(run_dir: Path) -> list[dict[str, float]]:
    """Returns the lines of metrics.jsonl without times."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if not name.startswith("time/") and not name.endswith("_s")}
        for line in lines
    ]


def killed(error: BaseException) -> Iterator[BaseException]:
    """Yields `error` or, if it is an exception group, the errors inside."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from killed(inner)
    else:
        yield error
