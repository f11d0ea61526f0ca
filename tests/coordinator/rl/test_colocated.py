"""Tests the phases of a colocated run: the order in which engines and trainer take and free memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.trainer.v1.trainer_pb2 import MODEL_PART_OPTIMIZER, MODEL_PART_PARAMETERS, OpenRunResponse
from lockstep.types.v1.types_pb2 import DeviceMemory, ModelCard, PolicyStamp, WeightGroup, WeightPlan

from services.common.errors import Overloaded, Reason, Unavailable
from services.common.rpc import client as retry
from services.coordinator.clients.gpus import OwnGpus, SharedGpus, Side
from services.coordinator.clients.replica import ReplicaState
from services.coordinator.clients.rollout import Rollout
from services.coordinator.rl.publishing import ColocatedPublisher, Publisher, make_publisher
from tests.coordinator.fake_services import FakeReplica, make_config, replicas
from tests.coordinator.rl.test_publication import FakeRun

OPTIMIZER, PARAMETERS = MODEL_PART_OPTIMIZER, MODEL_PART_PARAMETERS
TRAINED = ["sleep", "acquire parameters optimizer"]
PUBLISHED = [
    "release optimizer",
    "acquire parameters",
    "wake weights",
    "join",
    "send 1",
    "receive",
    "release parameters optimizer",
    "wake kv_cache",
    "commit",
]


@dataclass
class FakeTrainer:
    """Notes its calls in `events`, as the replica does."""

    events: list[str]
    groups: list[WeightGroup] = field(default_factory=list)
    opened: OpenRunResponse = field(
        default_factory=lambda: OpenRunResponse(num_ranks=1, weight_backend="gloo", plan=WeightPlan(num_senders=1))
    )
    fails: list[Exception] = field(default_factory=list)
    least_free_bytes: list[int] = field(default_factory=list)

    async def release_memory(self, *parts: int, roles: Any = (), least_free_bytes: int = 0) -> list[DeviceMemory]:
        self.least_free_bytes.append(least_free_bytes)
        self.events.append(f"release {self._names(parts)}")
        return [DeviceMemory(freed_bytes=1)]

    async def acquire_memory(self, *parts: int, roles: Any = ()) -> list[DeviceMemory]:
        self.events.append(f"acquire {self._names(parts)}")
        return [DeviceMemory(taken_bytes=1)]

    async def join(self, group: WeightGroup) -> str:
        self.groups.append(group)
        self.events.append("join")
        return "plan"

    async def send(self, epoch: int, version: int) -> PolicyStamp:
        if self.fails:
            raise self.fails.pop()
        self.events.append(f"send {version}")
        return PolicyStamp(version=version, digest="digest")

    def _names(self, parts: tuple[int, ...]) -> str:
        return " ".join({OPTIMIZER: "optimizer", PARAMETERS: "parameters"}[part] for part in parts)


class Sleeper(FakeReplica):
    """A replica that notes what it is asked."""

    events: list[str]
    frees = 800

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        self._fail("Sleep")
        self.events.append("sleep")
        frees, self.frees = self.frees, 0  # an engine that is asleep frees nothing
        return pb.SleepResponse(workers=[DeviceMemory(freed_bytes=frees, device_total_bytes=1000)])

    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        self._fail("Wake")
        self.events.append(f"wake {pb.EnginePart.Name(request.part).removeprefix('ENGINE_PART_').lower()}")
        return pb.WakeResponse(workers=[DeviceMemory(taken_bytes=300)])

    async def ReceiveWeights(self, request: pb.ReceiveWeightsRequest, context: Any) -> pb.ReceiveWeightsResponse:
        answer = await super().ReceiveWeights(request, context)
        self.events.append("receive")
        return answer

    async def CommitWeights(self, request: pb.CommitWeightsRequest, context: Any) -> pb.CommitWeightsResponse:
        answer = await super().CommitWeights(request, context)
        self.events.append("commit")
        return answer


@dataclass
class Parts:
    replica: Sleeper
    rollout: Rollout
    trainer: FakeTrainer
    gpus: SharedGpus
    publisher: ColocatedPublisher
    events: list[str]

    async def train(self) -> None:
        async with self.gpus.held_by(Side.TRAINER):
            self.events.append("train")

    async def generate(self) -> None:
        async with self.gpus.held_by(Side.ENGINES):
            self.events.append("generate")

    def taken(self) -> list[str]:
        """Returns the events since the last call. Sending and receiving run at the same time."""
        events, order = self.events.copy(), {"join": 0, "send 1": 1, "receive": 2}
        self.events.clear()
        both = [index for index, event in enumerate(events) if event in order]
        for index, event in zip(both, sorted((events[i] for i in both), key=order.__getitem__), strict=True):
            events[index] = event
        return events


@pytest_asyncio.fixture
async def parts() -> AsyncIterator[Parts]:
    async with parts_with(1) as made:
        yield made


@contextlib.asynccontextmanager
async def parts_with(num_replicas: int) -> AsyncIterator[Parts]:
    config, gpus, events = make_config(placement="colocated"), SharedGpus(), []
    async with replicas(num_replicas, Sleeper) as sleepers:
        for replica in sleepers:
            replica.events = events
        rollout = Rollout([replica.address for replica in sleepers], config, gpus=gpus)
        await rollout.open("run", ModelCard())
        trainer, run = FakeTrainer(events), FakeRun(config=config, run_id="run", epochs=[], published=[])
        services = SimpleNamespace(trainer=trainer, rollout=rollout, gpus=gpus)
        publisher = make_publisher(services, run)
        assert isinstance(publisher, ColocatedPublisher)
        yield Parts(sleepers[0], rollout, trainer, gpus, publisher, events)
        await rollout.close()


async def test_the_phases_of_a_step(parts: Parts) -> None:
    await parts.publisher.publish(1)  # the engine was just opened, and has all its memory
    assert parts.taken() == ["sleep", *PUBLISHED]
    (group,) = parts.trainer.groups
    assert (group.backend, group.world_size, group.num_trainer_ranks) == ("pairs", 2, 1)
    await parts.generate()
    await parts.generate()
    await parts.train()
    await parts.publisher.publish(1)
    await parts.generate()
    published = [event for event in PUBLISHED if event != "join"]  # the epoch stays
    assert parts.taken() == ["generate", "generate", *TRAINED, "train", *published, "generate"]


async def test_the_trainer_is_told_what_the_engine_needs_free(parts: Parts) -> None:
    await parts.publisher.publish(1)
    before_wake, with_weights = 800 + 50, 800 + 50 - 300  # what the engine freed, and a twentieth of the GPU
    assert parts.trainer.least_free_bytes == [before_wake, with_weights]
    await parts.train()
    parts.replica.frees = 700  # it needs as much as it ever had
    await parts.publisher.publish(1)
    assert parts.trainer.least_free_bytes[2:] == [before_wake, with_weights]


async def test_the_gpu_of_a_lost_replica_keeps_free_what_its_engine_will_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "backoff_s", lambda _: retry.MAX_RETRY_S)  # it is not called again until that has passed
    async with parts_with(2) as parts:
        await parts.publisher.publish(1)
        await parts.train()
        await parts.replica.die()
        await parts.publisher.publish(1)
        assert parts.trainer.least_free_bytes[-2:] == [800 + 50, 800 + 50]


async def test_the_trainer_moves_all_if_the_engine_was_asleep_before(parts: Parts) -> None:
    parts.replica.frees = 0
    await parts.publisher.publish(1)
    assert parts.trainer.least_free_bytes == [0, 0]


async def test_the_same_weights_are_published_again_if_the_trainer_only_saved(parts: Parts) -> None:
    await parts.publisher.publish(1)
    await parts.train()  # as a save does
    parts.taken()
    await asyncio.gather(*(parts.generate() for _ in range(3)))
    assert parts.taken() == [*(event for event in PUBLISHED if event != "join"), *["generate"] * 3]


async def test_a_publication_that_breaks_is_repeated_in_a_new_epoch(parts: Parts) -> None:
    await parts.train()
    parts.trainer.fails = [Unavailable("half-way")]
    parts.taken()
    assert await parts.publisher.publish(1) == PolicyStamp(version=1, digest="digest")
    # Sending and receiving run at the same time, and the first attempt may have received, too.
    again = [event for event in PUBLISHED if event not in ("join", "send 1", "receive")]
    assert [event for event in parts.events if event in again][-len(again) :] == again
    assert [group.epoch for group in parts.trainer.groups] == [1, 2]


async def test_engines_that_are_awake_sleep_before_another_attempt(parts: Parts) -> None:
    """The trainer's weights do not fit beside an engine that has taken its KV cache."""
    await parts.train()
    parts.replica.error, parts.replica.failures_left = {"CommitWeights": Unavailable("lost connection")}, 1
    parts.taken()
    await parts.publisher.publish(1)
    events = [event for event in parts.taken() if event in ("sleep", "wake weights", "wake kv_cache", "commit")]
    assert events == ["wake weights", "wake kv_cache", "sleep", "wake weights", "wake kv_cache", "commit"]


async def test_an_engine_that_dies_asleep_ends_the_run(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "backoff_s", lambda _: retry.MAX_RETRY_S)  # it is not called again until that has passed
    await parts.publisher.publish(1)
    await parts.train()
    await parts.replica.die()
    with pytest.raises(Unavailable) as caught:
        await parts.publisher.publish(1)
    assert caught.value.reason is Reason.NO_REPLICA
    assert parts.rollout.replicas[0].state is ReplicaState.DEAD


async def test_a_phase_that_does_not_fit_is_not_tried_again(parts: Parts) -> None:
    async def refuse(*args: Any) -> None:
        raise Overloaded("GPU-1 has 2.0 GiB free, 3.0 GiB are needed", reason=Reason.OUT_OF_MEMORY)

    await parts.publisher.publish(1)
    parts.rollout.replicas[0].wake = refuse  # type: ignore[method-assign]
    with pytest.raises(Overloaded, match=r"3\.0 GiB are needed"):
        await parts.publisher.publish(1)
    assert len(parts.trainer.groups) == 1


def test_a_run_with_own_gpus_has_the_plain_publisher() -> None:
    services = SimpleNamespace(trainer=None, rollout=None, gpus=OwnGpus())
    run = FakeRun(config=make_config())
    assert type(make_publisher(services, run)) is Publisher
