"""Records a run as it goes on: metrics.jsonl, TensorBoard, Prometheus, the trace and trackers.

`files` are those that every run has. `watchers` follow a run from start to end, as `observability` says.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.common.config.load import AnyConfig
from services.common.config.operation import ObservabilityConfig
from services.common.files import write_whole, writing
from services.common.rpc.server import SECONDS, Metrics, Page, incarnation
from services.common.telemetry import Otel, Trace, join
from services.coordinator.compat import import_tensorboardx
from services.coordinator.observe.trackers import open_tracker
from services.coordinator.runs.clock import StepClock
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.runs.reader import METRICS, metrics_lines
from services.coordinator.runs.reporter import ReplicaCounts, Reporter
from services.coordinator.runs.run import Run

log = logging.getLogger(__name__)


class JsonLines(Reporter):
    """Writes one JSON object per step or evaluation.

    Lines that the disk does not take are written later, as soon as it takes them.

    A resumed run removes lines that the ledger does not have, because their steps will be repeated. It takes missing
    and different lines from the ledger, which lacks only the time of an evaluation. A file with damaged lines is kept
    as metrics.damaged.jsonl. `version` is the last step that the run will not repeat.
    """

    def __init__(self, path: Path, version: int, ledger: Ledger):
        with writing(path):
            lines = _repaired(path, ledger)
            write_whole(path, "".join(f"{lines[place]}\n" for place in sorted(lines) if place[0] <= version))
            self._file, self._waiting = path.open("ab", buffering=0), b""

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self._waiting += (json.dumps({"step": version, **metrics}) + "\n").encode()
        self._write()

    evaluation = step

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        """Writes the waiting lines. If the disk takes only a part, nothing is written and all are tried again later."""
        begin, left = self._file.tell(), self._waiting
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(begin)
            raise
        self._waiting = b""


def _repaired(path: Path, ledger: Ledger) -> dict[tuple[int, bool], str]:
    """Returns the lines of everything in the ledger by place; those of the file, where it has the same numbers."""
    damaged: list[int] = []
    written = {line.place: line for line in metrics_lines(path, damaged)}
    if damaged:
        path.rename(path.with_name("metrics.damaged.jsonl"))
        message = "%s: line %s was damaged and is taken from the ledger; the old file is metrics.damaged.jsonl"
        log.warning(message, path, ", ".join(map(str, damaged)))
    lines: dict[tuple[int, bool], str] = {}
    for is_evaluation, rows in enumerate((ledger.all(Kind.FINISHED), ledger.evaluations())):
        for metrics in rows:
            place = metrics.pop("version"), bool(is_evaluation)
            line = written.get(place)
            if line and all(_is_same(line.metrics.get(name), value) for name, value in metrics.items()):
                lines[place] = line.text
            else:
                lines[place] = json.dumps({"step": place[0], **metrics})
    return lines


def _is_same(one: object, other: object) -> bool:
    return one == other or (one != one and other != other)  # NaN


class OpeningTimes(Reporter):
    """Gives the clock the seconds of each stage of a service, such as loading the model, until the first phase."""

    def __init__(self, clock: StepClock):
        self._clock, self._is_open = clock, True

    def stage(self, service: str, name: str, began_s: float, seconds: float | None = None) -> None:
        if self._is_open and seconds:
            self._clock.opening[f"{service}_{name}".replace(" ", "_")] = seconds

    def begin_phase(self, name: str, version: int) -> None:
        self._is_open = False


class TensorBoard(Reporter):
    """Writes an event file for TensorBoard.

    It writes in the caller's thread. SummaryWriter would write in a thread of its own, and wait for it forever if that
    thread fails, for example on a full disk.
    """

    def __init__(self, directory: Path, version: int):
        import_tensorboardx()
        from tensorboardX.event_file_writer import EventsWriter

        events, summaries = (import_module(f"tensorboardX.proto.{name}_pb2") for name in ("event", "summary"))
        self._event, self._summary = events.Event, summaries.Summary
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(directory / "events"))
            # Hides what an earlier session wrote for later steps.
            start = events.SessionLog(status=events.SessionLog.START)
            self._writer.write_event(self._event(wall_time=time.time(), step=version + 1, session_log=start))
            self._writer.flush()

    def step(self, version: int, metrics: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.write_event(self._event(wall_time=time.time(), step=version, summary=self._summary(value=values)))
        self._writer.flush()

    evaluation = step

    def close(self) -> None:
        self._writer.close()


def files(run: Run[AnyConfig], version: int) -> list[Reporter]:
    """Returns the reporters that write a run's metrics to files; the run continues after step `version`."""
    directory = run.config.run_dir
    metrics = JsonLines(directory / METRICS, version, run.record.ledger)
    return [metrics, TensorBoard(directory / "tensorboard", version)]


_OF_STEP = (
    ("step_seconds", "time/step_s", "Duration of the last finished step."),
    ("reward_mean", "reward/mean", "Mean reward of the last batch."),
)


class Prometheus(Reporter):
    """Serves `metrics` for the duration of the run."""

    def __init__(self, metrics: Metrics, run_id: str):
        self._metrics = metrics
        self._rollout: ReplicaCounts | None = None
        in_registry: dict[str, Any] = {
            "namespace": "lockstep",
            "subsystem": "coordinator",
            "registry": metrics.registry,
        }
        Info("run", "Id of the run.", **in_registry).info({"run_id": run_id})
        self._step = Gauge("step", "Finished steps.", **in_registry)
        phases = "Duration of each phase of the loop: generating, training, publishing, ..."
        self._phase_seconds = Histogram("phase_seconds", phases, ["phase"], buckets=SECONDS, **in_registry)
        self._tokens = Counter(
            "batch_tokens_total", "Tokens of all batches trained on, with those of environments.", **in_registry
        )
        self._of_step: Mapping[str, float] = {}
        self._of_evaluation: Mapping[str, float] = {}
        metrics.registry.register(self)
        metrics.serve()

    def collect(self) -> Iterator[Metric]:
        num_dead = self._rollout.num_dead if self._rollout else 0
        num_redispatched = self._rollout.num_redispatched if self._rollout else 0
        what = "Replicas that were lost and have not come back."
        yield GaugeMetricFamily("lockstep_coordinator_dead_replicas", what, num_dead)
        what = "Prompt groups sent to another replica after one did not finish them."
        yield CounterMetricFamily("lockstep_coordinator_redispatched_groups_total", what, num_redispatched)
        for name, number, what in _OF_STEP:
            if number in self._of_step:  # not before the first step of a session; an SFT run has no reward
                yield GaugeMetricFamily(f"lockstep_coordinator_{name}", what, self._of_step[number])
        what = "Every metric of the last step and evaluation, by its name in metrics.jsonl."
        numbers = GaugeMetricFamily("lockstep_coordinator_number", what, labels=["name"])
        for name, value in {**self._of_step, **self._of_evaluation}.items():
            numbers.add_metric([name], value)
        yield numbers

    def watch(self, rollout: ReplicaCounts) -> None:
        self._rollout = rollout

    def begin_phase(self, name: str, version: int) -> None:
        self._step.set(version)  # also where a session resumes

    def end_phase(self, name: str, seconds: float) -> None:
        self._phase_seconds.labels(name).observe(seconds)

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self._step.set(version)
        self._tokens.inc(metrics["batch/tokens"])
        self._of_step = metrics

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        self._of_evaluation = metrics

    def close(self) -> None:
        self._metrics.close()


def trace_path(run_dir: Path, name: str) -> Path:
    """Returns the file for the spans of the process `name`. Creates its directory."""
    directory = run_dir / "trace"
    directory.mkdir(parents=True, exist_ok=True)
    return (directory / f"{name}.json").absolute()


class RunTrace(Reporter):
    """Opens the trace that the run's clock writes. At the end, joins all spans of the run in trace.json."""

    def __init__(self, run: Run[AnyConfig]):
        config, self._run_dir = run.config, run.config.run_dir if run.config.trace else None
        path = trace_path(self._run_dir, "coordinator") if self._run_dir else ""
        self._trace = run.clock.trace = Trace(path, "coordinator", open_otel(config.observability))

    def close(self) -> None:
        self._trace.close()
        if self._run_dir:
            join(sorted((self._run_dir / "trace").glob("*.json")), self._run_dir / "trace.json")


def watchers(run: Run[AnyConfig]) -> list[Reporter]:
    """Creates the reporters before any service starts, so that a bad setting fails before a model is loaded.

    Raises:
        InvalidInput: An address is invalid or in use, or an extra is not installed.
    """
    with ExitStack() as opened:
        created = [opened.enter_context(closing(watcher)) for watcher in _open(run)]
        opened.pop_all()  # all were created; the run closes them
    return created


def make_metrics(settings: ObservabilityConfig) -> Metrics:
    """Returns the coordinator's metrics, whose page is not served yet.

    Raises:
        InvalidInput: Other hosts could reach the address, or it is none.
    """
    consent = "set observability.metrics_insecure=true"
    page = Page(settings.metrics_address, settings.metrics_insecure, "observability.metrics_address", consent)
    return Metrics("coordinator", page)


def open_otel(settings: ObservabilityConfig) -> Otel | None:
    """Returns what sends the coordinator's spans, if they are to be sent.

    Raises:
        InvalidInput: The endpoint is no URL, or an extra is not installed.
    """
    endpoint, field = settings.otel_endpoint, "observability.otel_endpoint"
    return Otel(endpoint, "lockstep-coordinator", incarnation(), field=field) if endpoint else None


def _open(run: Run[AnyConfig]) -> Iterator[Reporter]:
    settings = run.config.observability
    if run.config.trace or settings.otel_endpoint:
        yield RunTrace(run)
    if settings.metrics_address:
        yield Prometheus(make_metrics(settings), run.run_id)
    for tracker in settings.trackers:
        yield open_tracker(tracker, run)
