"""Compares the real coordinator with the model: what it does in whole runs, some of them killed, is a path of it."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lockstep.reward.v1 import environment_pb2 as pb

from services.common.config.run import Config
from services.common.rpc.client import Client
from services.coordinator.clients.trainer import BlockStream
from services.coordinator.runs.ledger import Ledger
from tests.coordinator.fake_environment import FakeEnvironment
from tests.coordinator.runs.killing import Deadline, Killed, Services, deadline, killed, make_run, surviving_services
from tests.model.coordinator import ended
from tests.model.protocol import PROTOCOL
from tests.model.search import FIRST, after
from tests.model.state import NUM_STEPS, Mode, World, world_of
from tests.trainer.harness_processes import marked

__all__ = ["deadline"]
# One real replica stands for the model's two; several groups of a step for its one.
_IGNORED = {"Rollout.OpenRun"}
SEEN = {event for step in PROTOCOL for event in step.emits} - _IGNORED
OF_EPISODES = {event for event in SEEN if event.startswith("Environment.")}
NUM_TURNS = 2
EPISODES = world_of(Mode(turns=NUM_TURNS))
KILLED = "killed"
Place = tuple[World, tuple[str, ...]]
"""A state of the model, and what can still be seen of the transition that led to it."""


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the calls that the coordinator sends and the rows that it has written."""
    events: list[str] = []
    record, call, stream, commit = Ledger.record, Client.call, Client.stream, BlockStream.commit

    def see(event: str) -> None:
        if event in SEEN:
            events.append(event)

    def recording(self: Ledger, kind: Any, version: int | None = None, **body: Any) -> int:
        number = record(self, kind, version, **body)
        see(kind.value)
        return number

    async def calling(self: Client, method: Any, *args: Any, **options: Any) -> Any:
        is_streamed = _name(method) == "Trainer.Train" and not callable(args[0])  # its commit is seen
        if not is_streamed:
            see(_name(method))
        return await call(self, method, *args, **options)

    def streaming(self: Client, method: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        see(_name(method))
        return stream(self, method, *args, **options)

    def committing(self: BlockStream, batch: Any) -> None:
        see("Trainer.Train")  # before it, the blocks of a batch have no effect
        commit(self, batch)

    monkeypatch.setattr(BlockStream, "commit", committing)
    monkeypatch.setattr(Ledger, "record", recording)
    monkeypatch.setattr(Client, "call", calling)
    monkeypatch.setattr(Client, "stream", streaming)
    return events


def _name(method: Any) -> str:
    return method.__qualname__.replace("ServiceServicer", "")


def without_repeats(events: Iterable[str]) -> Iterator[str]:
    """Leaves out all but the first Generate of a step, or of a turn."""
    is_drawing = False
    for event in events:
        if event == "Rollout.Generate":
            if is_drawing:
                continue
            is_drawing = True
        is_drawing = is_drawing and event not in ("collected", "Environment.Step", KILLED)
        yield event


def first_impossible(events: Iterable[str], first: World = FIRST) -> tuple[int, str] | None:
    """Returns number and name of the first event that no path from `first` has; None if `events` is a path."""
    places: set[Place] = {(first, ())}
    for number, event in enumerate(without_repeats(events)):
        places = _closure(places)
        if event == KILLED:
            places = {(ended(world), ()) for world, _ in places}
        else:
            places = {(world, coming[1:]) for world, coming in places if coming[:1] == (event,)}
        if not places:
            return number, event
    return None


def _closure(places: set[Place]) -> set[Place]:
    """Adds what can happen unseen."""
    reached, waiting = set(places), list(places)
    while waiting:
        world, coming = waiting.pop()
        if coming:
            continue
        for step, then in after(world, PROTOCOL, max_faults=0):
            place = then, tuple(event for event in step.emits if event in SEEN)
            if place not in reached:
                reached.add(place)
                waiting.append(place)
    return reached


def _made(directory: Path, **changes: Any) -> Config:
    config = make_run(directory, NUM_STEPS, **changes)
    evaluation = config.evaluation.model_copy(update={"eval_freq": 0, "eval_before_train": False})
    return config.model_copy(update={"evaluation": evaluation})


@pytest.mark.parametrize("changes", [{}, {"trainer": {"max_tokens_per_microbatch": 16}}], ids=["whole", "in blocks"])
async def test_an_undisturbed_run_is_a_path_of_the_model(changes: dict[str, Any], observed: list[str], tmp_path: Path):
    async with surviving_services() as services:
        await services.run(_made(tmp_path, **changes))
    assert {*observed} == SEEN - OF_EPISODES
    assert first_impossible(observed) is None
    wrong = [*observed]
    place = wrong.index("collected")
    wrong[place : place + 2] = "Trainer.Train", "collected"
    assert first_impossible(wrong) is not None


def _of_episodes(directory: Path) -> Config:
    """Returns the config of a run whose steps have one sample, of several turns."""
    environment = {"kind": "python", "path": "m:C", "max_turns": NUM_TURNS}
    config = _made(directory, environment=environment, advantage={"kind": "reinforce_plus_plus"})
    data = config.data.model_copy(update={"prompts_per_step": 1})
    return config.model_copy(
        update={"data": data, "rollout": config.rollout.model_copy(update={"completions_per_prompt": 1})}
    )


def _answers(turn: int, text: str) -> pb.StepResponse:
    return pb.StepResponse(messages=[pb.Message(role="", content="7")], done=turn + 1 == NUM_TURNS)


EVENTS = ["CommitWeights", "batch recorded", "Train", "ledger finished 1", "SaveCheckpoint"]


@pytest.mark.parametrize("event", marked(EVENTS, long=["CommitWeights", "ledger finished 1", "SaveCheckpoint"]))
async def test_so_is_a_run_whose_coordinator_is_killed(
    event: str, observed: list[str], deadline: Deadline, tmp_path: Path
):
    async with surviving_services() as services:
        await _killed_and_resumed(event, services, _made, observed, deadline, tmp_path)
    assert first_impossible(observed) is None


@pytest.mark.parametrize("event", marked(["Reset", "Step", "batch recorded"], long=["Reset", "batch recorded"]))
async def test_so_is_a_run_with_an_environment(event: str, observed: list[str], deadline: Deadline, tmp_path: Path):
    async with surviving_services(FakeEnvironment(_answers)) as services:
        await _killed_and_resumed(event, services, _of_episodes, observed, deadline, tmp_path)
    assert {*observed} == SEEN | {KILLED}
    assert first_impossible(observed, EPISODES) is None
    wrong = [*observed]
    wrong.insert(wrong.index("Environment.Step") + 1, "Trainer.Train")  # in the middle of an episode
    assert first_impossible(wrong, EPISODES) == (wrong.index("Environment.Step") + 1, "Trainer.Train")


async def _killed_and_resumed(
    event: str,
    services: Services,
    make: Callable[[Path], Config],
    observed: list[str],
    deadline: Deadline,
    directory: Path,
) -> None:
    """Observes a run whose coordinator is killed after the first `event`, and then started again."""
    for name in ("undisturbed", "killed"):
        (directory / name).mkdir()
    await services.run(make(directory / "undisturbed"))
    num_events = deadline.events.index(event) + 1
    observed.clear()
    deadline.restart(num_events)
    config = make(directory / "killed")
    try:
        await services.run(config)
    except BaseException as error:
        if not any(isinstance(one, Killed) for one in killed(error)):
            raise
        observed.append(KILLED)
    assert KILLED in observed
    deadline.restart()
    await services.run(config)
