"""Tests the trackers with fakes of their packages that record all calls.

The fakes have the functions of wandb 0.31 and mlflow-skinny 3.17; the same calls were tried by hand with both.
"""

import asyncio
import contextlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from services.common.errors import InvalidInput, PreconditionFailed
from services.coordinator.daemon.runs import RunInProgress
from services.coordinator.fleet.running import recorded_run
from services.coordinator.observe import trackers
from services.coordinator.observe.reporters import Prometheus, watchers
from services.coordinator.observe.terminal import Terminal
from services.coordinator.observe.trackers import Mlflow, Wandb
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.resume import open_run
from services.coordinator.runs.run import Run
from tests.coordinator.fake_services import make_config
from tests.support import PATIENCE_S

STEP, EVALUATION = {"reward/mean": 0.5, "time/step_s": 2.0}, {"eval/test/pass@4": 0.25}


@contextlib.contextmanager
def opened(directory: Path, *trackers: dict[str, Any]):
    config = make_config(name="run", runs_dir=directory, observability={"trackers": trackers})
    run = Run(config, open_run(config))
    try:
        run.reporters.add(watchers(run))
        run.begin(0, ())
        yield run
    finally:
        run.close()


def report(run: Run, *versions: int) -> None:
    for version in versions:
        run.reporters.tell(lambda reporter, step=version: reporter.step(step, STEP))
        run.reporters.tell(lambda reporter, step=version: reporter.evaluation(step, EVALUATION))


class FakeWandb(ModuleType):
    """Fake of the wandb package, with one run at a time."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[dict[str, Any]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.Settings = dict
        self.gate: threading.Event | None = None

    def init(self, **arguments: Any) -> "FakeWandb":
        assert self.gate is None or self.gate.wait(PATIENCE_S)
        self.runs.append(arguments)
        return self

    def define_metric(self, *arguments: Any, **more: Any) -> None:
        self.calls.append(("define_metric", *arguments, *more.values()))

    def log(self, numbers: dict[str, float]) -> None:
        self.calls.append(("log", numbers))

    def finish(self, *, exit_code: int | None = None) -> None:
        assert self.gate is None or self.gate.wait(PATIENCE_S)
        self.calls.append(("finish",) if exit_code is None else ("finish", exit_code))


def test_wandb_hears_of_every_step_and_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = {"kind": "wandb", "project": "p", "entity": "e", "mode": "offline"}
    for versions in ((1, 2), (2, 3)):
        with opened(tmp_path, settings) as run:
            report(run, *versions)
    first, second = wandb.runs
    assert first == second
    assert first["id"] == run.run_id and first["resume"] == "allow"
    assert [first[name] for name in ("project", "entity", "mode", "name")] == ["p", "e", "offline", "run"]
    assert first["dir"] == str(tmp_path / "run")
    assert first["config"]["trainer"]["optim"]["lr"] == run.config.trainer.optim.lr
    axis = [("define_metric", "step"), ("define_metric", "*", "step")]
    numbers = [[("log", {"step": v, **STEP}), ("log", {"step": v, **EVALUATION})] for v in (1, 2, 3)]
    assert wandb.calls == [*axis, *numbers[0], *numbers[1], ("finish",), *axis, *numbers[1], *numbers[2], ("finish",)]


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


class FakeMlflow:
    """Fake of an MLflow tracking server and its client."""

    def __init__(self) -> None:
        self.uris: list[str | None] = []
        self.experiments: list[str] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def MlflowClient(self, tracking_uri: str | None) -> "FakeMlflow":
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return name

    def search_runs(self, experiments: list[str], query: str) -> list[SimpleNamespace]:
        assert experiments == self.experiments
        wanted = query.removeprefix("tags.lockstep_run_id = '").removesuffix("'")
        found = [key for key, run in self.runs.items() if run["tags"]["lockstep_run_id"] == wanted]
        return [SimpleNamespace(info=SimpleNamespace(run_id=key)) for key in found]

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> SimpleNamespace:
        key = f"m{len(self.runs)}"
        self.runs[key] = {"tags": tags, "name": run_name, "status": "RUNNING", "metrics": [], "params": {}}
        return SimpleNamespace(info=SimpleNamespace(run_id=key))

    def update_run(self, key: str, status: str) -> None:
        self.runs[key]["status"] = status

    def log_batch(self, key: str, metrics: Any = (), params: Any = ()) -> None:
        assert self.gate.wait(PATIENCE_S)
        if self.error:
            raise self.error
        self.runs[key]["metrics"] += metrics
        self.runs[key]["params"] |= dict(params)

    def set_terminated(self, key: str, status: str | None = None) -> None:
        self.runs[key]["status"] = status or "FINISHED"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    server, package, entities = FakeMlflow(), ModuleType("mlflow"), ModuleType("mlflow.entities")
    package.MlflowClient, package.entities = server.MlflowClient, entities
    entities.Metric, entities.Param = Metric, Param
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return server


def test_mlflow_hears_of_every_step_and_goes_on_with_its_run(tmp_path: Path, mlflow: FakeMlflow) -> None:
    for versions in ((1,), (2,)):
        with opened(tmp_path, {"kind": "mlflow", "experiment": "e", "uri": "http://me:s3@cret@h:5000"}) as run:
            report(run, *versions)
    assert (mlflow.uris, mlflow.experiments) == (["http://me:s3@cret@h:5000"] * 2, ["e"])
    (kept,) = mlflow.runs.values()
    assert (kept["name"], kept["tags"], kept["status"]) == ("run", {"lockstep_run_id": run.run_id}, "FINISHED")
    assert [(m.key, m.value, m.step) for m in kept["metrics"]] == [
        (name, number, step)
        for step in (1, 2)
        for name, number in (("reward/mean", 0.5), ("time/step_s", 2.0), ("eval/test/pass_4", 0.25))
    ]
    assert kept["params"]["trainer.optim.lr"] == str(run.config.trainer.optim.lr)
    assert kept["params"]["model"] == '"m"' and '"uri": "http://h:5000"' in kept["params"]["observability.trackers"]


def test_the_loop_does_not_wait_for_mlflow(
    tmp_path: Path, mlflow: FakeMlflow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Mlflow, "close_timeout_s", 0.1)
    with opened(tmp_path, {"kind": "mlflow", "uri": "http://h:5000"}) as run:
        mlflow.gate.clear()
        report(run, 1, 2)  # returns although the server hangs
    assert "MLflow did not answer for 0.1 s" in caplog.text
    mlflow.gate.set()


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, mlflow: FakeMlflow, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, {"kind": "mlflow", "uri": "http://h:5000"}) as run:
        mlflow.error = ConnectionError("server https://me:s3@cret@h is gone")
        report(run, 7)
    logged = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(logged) == 2 and all("step 7" in line and "server https://h is gone" in line for line in logged)


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_missing_package_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with (
        pytest.raises(InvalidInput, match=rf"observability\.trackers: {kind}.*pip install 'lockstep-rl\[{kind}\]'"),
        opened(tmp_path, {"kind": kind}),
    ):
        pass


def test_a_tracker_that_does_not_start_is_an_error(
    tmp_path: Path, mlflow: FakeMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, why = "https://me:s3@cret@h:5000/x", r"\(uri https://h:5000/x\): OSError: no https://h:5000/x/api"
    monkeypatch.setattr(mlflow, "get_experiment_by_name", raising(OSError(f"no {uri}/api")))
    with (
        pytest.raises(PreconditionFailed, match=f"mlflow does not start {why}"),
        opened(tmp_path, {"kind": "mlflow", "uri": uri}),
    ):
        pass


class Strange(BaseException):
    """Is no Exception, as some libraries raise."""


ERRORS = [RuntimeError("broken"), KeyError("gone"), OSError(28, "No space left"), SystemExit(3), Strange("odd")]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(trackers, "_RETRIES_S", (0.0, 0.0))
    return fake


def raising(error: BaseException) -> Callable[..., None]:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    return fails


@pytest.mark.parametrize("method", ["log", "finish"])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_no_error_of_a_tracker_reaches_the_run(
    tmp_path: Path,
    wandb: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    error: BaseException,
):
    with opened(tmp_path, {"kind": "wandb"}) as run:
        monkeypatch.setattr(wandb, method, raising(error))
        for version in range(1, 30):
            run.finish_step(version, STEP)
        assert run.record.ledger.last(Kind.FINISHED, 29)
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"W&B did not accept {'the metrics of step 1 ' if method == 'log' else 'the end'}" in warned[0]
    assert type(error).__name__ in warned[0] and len(warned) == (2 if method == "log" else 1)
    assert method == "finish" or warned[1] == "W&B misses 29 reports; metrics.jsonl has all metrics"


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_tracker_that_fails_at_its_start_is_refused(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    monkeypatch.setattr(wandb, "init", raising(error))
    with (
        pytest.raises(PreconditionFailed, match=f"wandb does not start: .*{type(error).__name__}"),
        opened(tmp_path, {"kind": "wandb"}),
    ):
        pass


def test_a_report_that_fails_once_is_not_lost(tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch):
    errors, log = [ConnectionError("a pause")], wandb.log

    def fails_once(numbers: dict[str, float]) -> None:
        if errors:
            raise errors.pop()
        log(numbers)

    with opened(tmp_path, {"kind": "wandb"}) as run:
        monkeypatch.setattr(wandb, "log", fails_once)
        report(run, 1, 2)
    assert [call[1]["step"] for call in wandb.calls if call[0] == "log"] == [1, 1, 2, 2]


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_tracker_that_hangs_does_not_stop_the_run(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
):
    gate = threading.Event()
    monkeypatch.setattr(Wandb, "close_timeout_s", 0.1)
    if method == "log":
        monkeypatch.setattr(trackers, "_MAX_WAITING", 5)
    monkeypatch.setattr(wandb, method, lambda *_, **__: gate.wait(PATIENCE_S))
    with opened(tmp_path, {"kind": "wandb"}) as run:
        for version in range(1, 30):
            run.finish_step(version, STEP)
    assert "W&B did not answer for 0.1 s; metrics.jsonl has" in caplog.text
    assert (caplog.text.count("5 reports wait for it already") == 1) is (method == "log")
    gate.set()


def test_a_tracker_that_hangs_at_its_start_is_refused(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
):
    gate = threading.Event()
    monkeypatch.setattr(trackers, "OPEN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(wandb, "init", lambda **_: gate.wait(PATIENCE_S))
    with (
        pytest.raises(PreconditionFailed, match=r"wandb does not start: TimeoutError: no answer for 0\.1 s"),
        opened(tmp_path, {"kind": "wandb"}),
    ):
        pass
    gate.set()


@pytest.mark.parametrize(
    ("end", "exit_code", "status"),
    [
        (None, (), "FINISHED"),
        (ValueError("a bug"), (1,), "FAILED"),
        (PreconditionFailed("no"), (1,), "FAILED"),
        (asyncio.CancelledError(), (130,), "KILLED"),
        (KeyboardInterrupt(), (130,), "KILLED"),
        ("stop", (130,), "KILLED"),
    ],
    ids=repr,
)
async def test_trackers_learn_how_the_run_ended_and_other_runs_go_on_meanwhile(
    tmp_path: Path, wandb: FakeWandb, mlflow: FakeMlflow, end: Any, exit_code: tuple[int, ...], status: str
):
    trackers = [{"kind": "wandb"}, {"kind": "mlflow", "uri": "http://h:5000"}]
    config = make_config(name="run", runs_dir=tmp_path, observability={"trackers": trackers})
    wandb.gate, loop = threading.Event(), asyncio.get_running_loop()
    with contextlib.suppress(BaseException):
        loop.call_soon(wandb.gate.set)  # as soon as the run does not hold the event loop
        async with recorded_run(config, None) as run:
            wandb.gate.clear()
            loop.call_soon(wandb.gate.set)
            run.begin(0, ())
            report(run, 1)
            run.stopping = end == "stop"
            if isinstance(end, BaseException):
                raise end
            run.version = 1 if run.stopping else run.num_steps
    assert wandb.calls[-1] == ("finish", *exit_code)
    (kept,) = mlflow.runs.values()
    assert kept["status"] == status


class Failing(Reporter):
    """A reporter whose every method raises."""

    def __init__(self, error: Exception):
        for name in ("watch", "begin_phase", "end_phase", "step", "evaluation", "note_ending", "close"):
            setattr(self, name, raising(error))


@pytest.mark.parametrize("error", [OSError(28, "full"), ValueError("no"), KeyError("x"), PreconditionFailed("p")])
def test_no_reporter_ends_the_run_or_hides_its_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
):
    config = make_config(name="run", runs_dir=tmp_path)
    with contextlib.closing(Run(config, open_run(config))) as run:
        run.begin(0, [Failing(error)])
        for version in range(3):
            with run.phase(Phase.TRAINING):
                pass
            run.finish_step(version + 1, STEP)
        with pytest.raises(ZeroDivisionError), run.phase(Phase.TRAINING):
            _ = 1 / 0
        run.finish_evaluation(3, EVALUATION)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith(f"Failing misses what it should show: {type(error).__name__}: ")


def test_every_reporter_takes_what_a_run_tells_it():
    kinds, found = [Reporter], list[type[Reporter]]()
    while kinds:
        kinds += kinds[0].__subclasses__()
        found.append(kinds.pop(0))
    assert {RunInProgress, Terminal, Prometheus} <= {*found}
    for kind in found:
        for name in ("watch", "begin_phase", "end_phase", "step", "evaluation", "note_ending", "close"):
            arguments = inspect.signature(getattr(Reporter, name)).parameters
            assert len(inspect.signature(getattr(kind, name)).parameters) == len(arguments), (kind, name)
            assert not inspect.iscoroutinefunction(getattr(kind, name)), (kind, name)
