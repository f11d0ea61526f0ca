"""Tests the coordinator daemon: several runs, many watchers, and failures and stops that affect only their own run."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from lockstep.coordinator.v1 import coordinator_pb2 as pb
from lockstep.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceServicer as CoordinatorService
from rich.console import Console

from services.common.config.run import Config
from services.common.errors import InternalError, InvalidInput, NotFound, PreconditionFailed, Unavailable
from services.common.rpc.client import Client
from services.coordinator.daemon import runs as runs_module
from services.coordinator.daemon.client import Coordinator, follow
from services.coordinator.daemon.runs import Runs
from services.coordinator.fleet.launch import Addresses
from services.coordinator.observe.frontend import Outcome
from tests.coordinator.daemon.harness import (
    MODEL,
    NUM_STEPS,
    Daemon,
    Fakes,
    Watcher,
    daemon,
    fake_services,
    run_settings,
    steps,
)
from tests.support import PATIENCE_S, raises, until

STARTING, STOPPING, FINISHED = pb.RUN_STATE_STARTING, pb.RUN_STATE_STOPPING, pb.RUN_STATE_FINISHED
ALL_STEPS = list(range(1, NUM_STEPS + 1))


@pytest_asyncio.fixture
async def here(tmp_path: Path) -> AsyncIterator[Daemon]:
    async with daemon(tmp_path) as running:
        yield running


@pytest_asyncio.fixture
async def fakes() -> AsyncIterator[Fakes]:
    async with fake_services() as services:
        yield services


async def test_a_run_is_watched_from_its_first_step_to_its_end(here: Daemon, fakes: Fakes):
    may_answer = asyncio.Event()
    fakes.trainer.may_open.clear()
    fakes.trainer.hold_after(0)
    fakes.replica.before_answer = lambda prompt: may_answer.wait()
    started = await here.run(fakes)
    assert (started.name, started.state, started.num_steps) == ("run", STARTING, NUM_STEPS)
    # Nothing goes on before both have heard of it.
    first, second = watchers = here.watcher(), here.watcher()
    for hears, go_on in (
        (lambda answer: answer.run.state == STARTING, fakes.trainer.may_open.set),
        (lambda answer: answer.run.phase == "generating", may_answer.set),
        (lambda answer: answer.run.phase == "training", fakes.trainer.let_go),
    ):
        await asyncio.gather(*(watcher.until(hears) for watcher in watchers))
        go_on()
    early, other, late = await first.end(), await second.end(), await here.watched()
    assert steps(early) == steps(other) == steps(late) == ALL_STEPS
    states = list(dict.fromkeys(answer.run.state for answer in early))
    assert states == [STARTING, pb.RUN_STATE_RUNNING, FINISHED]
    assert {"generating", "training"} <= {answer.run.phase for answer in early}
    last = late[-1].run
    assert last == early[-1].run == await here.coordinator.get("run")
    assert (last.version, last.error, Path(last.export_path).is_dir()) == (NUM_STEPS, "", True)

    lines = [json.loads(line) for line in (Path(last.run_dir) / "metrics.jsonl").read_text().splitlines()]
    for answers in (early, late):
        told = [answer.step for answer in answers if answer.HasField("step")]
        assert [{"step": step.version, **step.values} for step in told] == lines

    with (Path(last.run_dir) / "metrics.jsonl").open("a") as file:  # as `lockstep run` does that resumes it
        file.write(json.dumps(lines[-1] | {"step": NUM_STEPS + 1}) + "\n")
    for run in (await here.coordinator.get("run"), *await here.coordinator.all()):
        assert run.version == NUM_STEPS + 1


async def test_held_out_numbers_are_told_with_the_steps(here: Daemon, fakes: Fakes):
    data = run_settings(here.directory)["data"]
    data["eval"] = {"test": data["train"]}
    await here.run(fakes, data=data, num_steps=2, evaluation={"eval_freq": 1})
    for answers in (await here.watched(), await here.watched()):
        told = [(answer.WhichOneof("event"), answer.evaluation.version) for answer in answers]
        assert [version for kind, version in told if kind == "evaluation"] == [0, 1, 2]
        assert steps(answers) == [1, 2]
        for answer in answers:
            kind = answer.WhichOneof("event") or "step"
            assert ("time/evaluating_s" in getattr(answer, kind).values) == (kind == "evaluation")
        assert all("eval/test/reward" in a.evaluation.values for a in answers if a.HasField("evaluation"))
    console = Console(file=io.StringIO(), width=80)
    await follow(Coordinator(here.address), "run", console)
    table = [line.split("│")[1].strip() for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert table == ["test/reward", "test/fake", "test/tokens_mean", "test/truncated"]


async def test_a_run_that_fails_harms_no_other(here: Daemon, fakes: Fakes):
    fakes.trainer.hold_after(1)
    await here.run(fakes, name="good")
    await fakes.trainer.training.wait()
    async with fake_services() as broken:
        broken.trainer.error = InternalError("rank 3 is on fire")
        await here.run(broken, name="bad")
        answers = await here.watched("bad")
    assert (answers[-1].run.state, steps(answers)) == (pb.RUN_STATE_FAILED, [])
    assert "rank 3 is on fire" in answers[-1].run.error
    await here.run(fakes, name="worse", model="/no/model")
    assert (await here.watched("worse"))[-1].run.state == pb.RUN_STATE_FAILED
    assert {run.name: run.state for run in await here.coordinator.all()}["good"] == pb.RUN_STATE_RUNNING


async def test_each_run_has_its_own_log(here: Daemon, fakes: Fakes):
    async with fake_services() as others:
        await asyncio.gather(here.run(fakes, name="a"), here.run(others, name="b"))
        await asyncio.gather(here.watched("a"), here.watched("b"))
    for name, other in (("a", "b"), ("b", "a")):
        log = (here.runs.directory / name / "logs" / "coordinator.log").read_text()
        assert f"run {name}-" in log and f"run {other}-" not in log


async def test_what_cannot_be_started_is_refused_with_the_reason(here: Daemon, fakes: Fakes, monkeypatch):
    fakes.trainer.hold_after(0)
    await here.run(fakes)
    with raises(PreconditionFailed) as refused:
        await here.run(fakes)
    assert refused.value.metadata["run"] == "run"
    with raises(InvalidInput, field="runs_dir"):
        await here.run(fakes, name="other", runs_dir="elsewhere")
    with raises(InvalidInput, field="addresses.trainer"):
        await here.coordinator.start(Config(**run_settings(here.directory)), Addresses(trainer="nowhere"))
    with pytest.raises(InvalidInput, match="num_stepz: unknown key; did you mean num_steps"):
        await here.client.call(
            CoordinatorService.StartRun, pb.StartRunRequest(config_json='{"num_stepz": 1}'), timeout_s=PATIENCE_S
        )
    for method in ("get", "stop"):
        with raises(NotFound, field="name"):
            await getattr(here.coordinator, method)("../runs/run", **({"now": False} if method == "stop" else {}))
    assert [run.name for run in await here.coordinator.all()] == ["run"]
    # Two runs cannot both use this host's GPUs.
    monkeypatch.setattr(runs_module, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(here.runs.running["run"], "addresses", Addresses(rollout=("h:1",)))
    with pytest.raises(PreconditionFailed, match="run run has started services on the GPUs of this host"):
        here.runs.start(Config(**run_settings(here.directory, name="greedy")), Addresses(trainer="h:1"))
    assert (await here.run(fakes, name="modest")).state == STARTING
    here.runs.is_ending = True
    with raises(Unavailable):
        await here.run(fakes, name="late")


async def test_a_model_on_the_hub_is_fetched_for_a_trainer_that_is_started_here(
    here: Daemon, fakes: Fakes, monkeypatch
):
    asked, ran = list[bool](), list[str]()

    def local_model(model: str, *, has_weights: bool, field: str) -> str:
        asked.append(has_weights)
        return str(MODEL)

    async def run_session(config: Config, *_: object) -> Outcome:
        ran.append(config.model)
        return Outcome(config.run_dir, NUM_STEPS, NUM_STEPS, [], None)

    monkeypatch.setattr("services.coordinator.data.reading.hub.local_model", local_model)
    monkeypatch.setattr(runs_module, "run_session", run_session)
    config = Config(**run_settings(here.directory, model="owner/name"))
    await here.coordinator.start(config, Addresses(fakes.given.rollout, fakes.given.reward))
    assert (await here.watched())[-1].run.state == FINISHED
    assert (asked, ran) == ([False, True], [str(MODEL)])


async def test_a_stop_lets_the_step_end_and_a_new_daemon_goes_on_from_there(here: Daemon, fakes: Fakes):
    fakes.trainer.hold_after(1)
    await here.run(fakes)
    watcher = here.watcher()
    await watcher.until(lambda answer: answer.run.version == 1)
    await until(fakes.trainer.training.is_set)
    assert (await here.coordinator.stop("run", now=False)).state == STOPPING
    await watcher.until(lambda answer: answer.run.state == STOPPING)
    fakes.trainer.permits.release()
    first = await watcher.end()
    assert (steps(first), first[-1].run.state, first[-1].run.version) == ([1, 2], pb.RUN_STATE_STOPPED, 2)

    (here.runs.directory / "unrelated").mkdir()
    here.runs = Runs(here.runs.directory)
    await here.break_off()
    await here.start()
    (found,) = await here.coordinator.all()
    assert found == first[-1].run
    assert steps(await here.watched()) == [1, 2]
    fakes.trainer.hold_after(1000)
    metrics = here.runs.directory / "run" / "metrics.jsonl"
    metrics.write_bytes(b"\xff" + metrics.read_bytes())
    await here.run(fakes)  # which takes the damaged line from the ledger
    again = await here.watched()
    assert (steps(again), again[-1].run.state) == (ALL_STEPS, FINISHED)
    assert again[-1].run.run_id == first[-1].run.run_id
    assert (await Runs(here.runs.directory).get("run")).state == FINISHED
    metrics.write_bytes(b"\xff" + metrics.read_bytes())
    await here.run(fakes)  # which has nothing left to do
    await until(lambda: not here.runs.running)
    assert "line 1 of" in (await here.coordinator.get("run")).error


async def test_a_stop_that_does_not_wait(here: Daemon, fakes: Fakes):
    fakes.trainer.hold_after(1)
    await here.run(fakes)
    await here.watcher().until(lambda answer: answer.run.version == 1)
    await until(fakes.trainer.training.is_set)
    await here.coordinator.stop("run", now=True)
    answers = await here.watched()
    assert (steps(answers), answers[-1].run.state) == ([1], pb.RUN_STATE_STOPPED)
    # A run that waits for its services stops at the first request.
    nowhere = Config(**run_settings(here.directory, name="waiting"))
    await here.coordinator.start(nowhere, Addresses(("127.0.0.1:9",), reward=("127.0.0.1:9",), trainer="127.0.0.1:9"))
    await here.coordinator.stop("waiting", now=False)
    assert (await here.watched("waiting"))[-1].run.state == pb.RUN_STATE_STOPPED
    assert (await here.coordinator.stop("waiting", now=False)).state == pb.RUN_STATE_STOPPED


async def test_a_slow_watcher_holds_nobody_and_misses_no_step(here: Daemon, fakes: Fakes):
    fakes.trainer.may_open.clear()
    await here.run(fakes, num_steps=20)
    slow = here.runs.running["run"].events(0)
    first = await anext(slow)
    fakes.trainer.may_open.set()
    assert steps(await here.watched()) == list(range(1, 21))
    rest = [answer async for answer in slow]
    assert steps(rest) == list(range(1, 21))
    assert len(rest) <= 21  # phases in between are not reported
    assert (first.run.state, rest[-1].run.state) == (STARTING, FINISHED)


async def broken_off_after_a_step(here: Daemon, fakes: Fakes) -> Watcher:
    fakes.trainer.hold_after(1)
    await here.run(fakes)
    watcher = here.watcher()
    await watcher.until(lambda answer: answer.HasField("step"))
    await here.break_off()
    fakes.trainer.let_go()
    return watcher


async def test_a_watcher_comes_back_after_a_break(here: Daemon, fakes: Fakes):
    watcher = await broken_off_after_a_step(here, fakes)
    async with asyncio.timeout(PATIENCE_S):
        await here.runs.running["run"].ended.wait()
    coordinator, client = here.coordinator, here.client
    await here.start()
    heard = await watcher.end()
    await coordinator.__aexit__()
    await client.close()
    assert (steps(heard), heard[-1].run.state) == (ALL_STEPS, FINISHED)


async def test_a_watcher_waits_although_its_call_met_the_end_of_the_connection(
    here: Daemon, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
):
    call, lost = Client.call, list[object]()

    async def first_is_lost(self: Client, method, request, **options):
        if method is CoordinatorService.GetRun and options.get("wait_for_ready") and not lost:
            lost.append(request)
            raise Unavailable("GetRun: Socket closed")
        return await call(self, method, request, **options)

    monkeypatch.setattr(Client, "call", first_is_lost)
    watcher = await broken_off_after_a_step(here, fakes)
    coordinator, client = here.coordinator, here.client
    await until(lambda: bool(lost))
    await here.start()
    assert steps(await watcher.end()) == ALL_STEPS
    await coordinator.__aexit__()
    await client.close()


async def test_logs_of_one_service_as_they_are_written(here: Daemon, fakes: Fakes):
    fakes.trainer.hold_after(1)
    await here.run(fakes)
    await fakes.trainer.training.wait()
    logs = here.runs.directory / "run" / "logs"
    (logs / "trainer.log").write_text("x" * 600_000)
    (logs / "passwords.log").symlink_to("/etc/passwd")
    heard: list[bytes] = []

    async def follow() -> None:
        async for data in here.coordinator.read_log("run", "trainer", follow=True):
            heard.append(data)

    following = asyncio.create_task(follow())
    for line in (b"one\n", b"two\n"):
        with (logs / "trainer.log").open("ab") as file:
            file.write(line)
        await until(lambda line=line: b"".join(heard).endswith(line))
    fakes.trainer.let_go()
    async with asyncio.timeout(PATIENCE_S):
        await following
    assert b"".join(heard) == b"x" * 600_000 + b"one\ntwo\n"
    assert max(map(len, heard)) == 256 << 10
    whole = [data async for data in here.coordinator.read_log("run", "", follow=False)]
    assert b"".join(whole) == (logs / "coordinator.log").read_bytes() != b""
    for service in ("../../other/logs/trainer", "/etc/hostname", "passwords", "reward"):
        with raises(NotFound, field="service"):
            _ = [data async for data in here.coordinator.read_log("run", service, follow=True)]


async def test_a_config_without_runs_dir_runs_in_the_daemons_directory(here: Daemon, fakes: Fakes):
    given = pb.ServiceAddresses(rollout=fakes.given.rollout, reward=fakes.given.reward, **fakes.given.trainers)
    request = pb.StartRunRequest(config_json=json.dumps(run_settings(here.directory)), addresses=given)
    answer = await here.client.call(CoordinatorService.StartRun, request, timeout_s=PATIENCE_S)
    assert answer.run.run_dir == str(here.runs.directory / "run")
    assert (await here.watched())[-1].run.state == FINISHED


async def test_beyond_its_end_a_log_has_nothing(here: Daemon, fakes: Fakes):
    await here.run(fakes)
    await here.watched()
    for offset in (1 << 40, 2**63 - 1, 2**63, 2**64 - 1):
        request = pb.ReadLogRequest(name="run", offset=offset)
        parts = here.client.stream(CoordinatorService.ReadLog, request, timeout_s=PATIENCE_S)
        assert not [part async for part in parts]
