"""Sends metrics to experiment trackers. The library of each kind is an optional extra, imported only when configured.

Each tracker runs in a thread of its own, so that neither its errors nor its waiting reach the run.
"""

import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib.util import find_spec

from services.common.config.load import AnyConfig
from services.common.config.operation import MlflowConfig, TrackerConfig, WandbConfig
from services.common.errors import InvalidInput, PreconditionFailed, without_passwords
from services.common.json_values import JsonObject
from services.coordinator.runs.reporter import Ending, Reporter
from services.coordinator.runs.run import Run

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 120.0
# Reports that wait for a slow tracker; further ones are left out.
_MAX_WAITING = 10_000
# Pauses before a call that failed is repeated. The libraries repeat their own requests for minutes.
_RETRIES_S = (1.0, 5.0)

_Job = tuple[str, str, Callable[[Reporter], object]]


class Threaded(Reporter):
    """Passes reports on to the tracker that `make` returns.

    A report that fails is repeated, then left out; each kind of failure is logged once. At the end of the run it waits
    for the tracker, at most `close_timeout_s`.

    Raises:
        TimeoutError: The tracker does not start within OPEN_TIMEOUT_S.
        Exception: Whatever `make` raises.
    """

    def __init__(self, name: str, make: Callable[[], Reporter], close_timeout_s: float):
        self._name, self._make, self._close_timeout_s = name, make, close_timeout_s
        self._ending = Ending.FINISHED
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing, self._num_lost, self._logged = threading.Event(), 0, set[tuple[str, str]]()
        opened: Future[None] = Future()
        # A daemon thread: the process does not wait for it at its end.
        self._thread = threading.Thread(target=self._send, args=(opened,), name=name, daemon=True)
        self._thread.start()
        try:
            opened.result(OPEN_TIMEOUT_S)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no answer for {OPEN_TIMEOUT_S:g} s") from error

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self._put("step", f"the metrics of step {version}", lambda tracker: tracker.step(version, metrics))

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        what = f"the evaluation after step {version}"
        self._put("evaluation", what, lambda tracker: tracker.evaluation(version, metrics))

    def note_ending(self, ending: Ending) -> None:
        self._ending = ending

    def close(self) -> None:
        def finish(tracker: Reporter) -> None:
            tracker.note_ending(self._ending)
            tracker.close()

        self._jobs.put(("end", "the end of the run", finish))
        self._jobs.put(None)
        self._closing.set()
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            why = f"did not answer for {self._close_timeout_s:g} s"
            log.warning("%s %s; metrics.jsonl has the metrics that it is missing", self._name, why)
        elif self._num_lost > len(self._logged):
            log.warning("%s misses %d reports; metrics.jsonl has all metrics", self._name, self._num_lost)

    def _put(self, kind: str, what: str, call: Callable[[Reporter], object]) -> None:
        if self._jobs.qsize() < _MAX_WAITING:
            self._jobs.put((kind, what, call))
        else:
            self._lose("queue", what, TimeoutError(f"{_MAX_WAITING} reports wait for it already"))

    def _send(self, opened: Future[None]) -> None:
        try:
            tracker = self._make()
        except BaseException as error:  # noqa: BLE001 the caller raises it
            opened.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            return
        opened.set_result(None)
        while job := self._jobs.get():
            self._call_with_retries(tracker, *job)

    def _call_with_retries(self, tracker: Reporter, kind: str, what: str, call: Callable[[Reporter], object]) -> None:
        for pause_s in (*_RETRIES_S, None):
            try:
                call(tracker)
            except BaseException as error:  # noqa: BLE001 its library may raise anything, SystemExit too
                if pause_s is None:
                    self._lose(kind, what, error)
                else:
                    self._closing.wait(pause_s)
            else:
                return

    def _lose(self, kind: str, what: str, error: BaseException) -> None:
        self._num_lost += 1
        failure = kind, type(error).__name__
        if failure not in self._logged:
            self._logged.add(failure)
            message = "%s did not accept %s (metrics.jsonl has all metrics; the run goes on): %s: %s"
            log.warning(message, self._name, what, failure[1], without_passwords(str(error)))


RUN_TAG = "lockstep_run_id"
# Characters that MLflow does not allow in a metric's name: pass@4 becomes pass_4.
_NOT_ALLOWED = re.compile(r"[^\w./ -]")
_MLFLOW_STATUS = {Ending.FINISHED: "FINISHED", Ending.FAILED: "FAILED", Ending.INTERRUPTED: "KILLED"}


def _shown_config(run: Run[AnyConfig]) -> JsonObject:
    return json.loads(without_passwords(run.config.model_dump_json()))


def without_store(tracker: TrackerConfig) -> str:
    """Returns what to do if MLflow may have nowhere to keep runs; "" if it has, and for other trackers.

    mlflow-skinny, which the extra installs, is only the client of a server.
    """
    if tracker.kind != "mlflow" or tracker.uri or os.environ.get("MLFLOW_TRACKING_URI") or find_spec("sqlalchemy"):
        return ""
    return "set uri to a server (http://HOST:PORT), or pip install mlflow, which keeps runs in ./mlflow.db"


class Mlflow(Reporter):
    """Sends metrics by step to MLflow. Its methods wait for the server."""

    close_timeout_s = 30.0

    def __init__(self, settings: MlflowConfig, run: Run[AnyConfig]):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client, self._ending = Metric, MlflowClient(tracking_uri=settings.uri), Ending.FINISHED
        known = self._client.get_experiment_by_name(settings.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(settings.experiment)
        before = self._client.search_runs([experiment], f"tags.{RUN_TAG} = '{run.run_id}'")
        if before:
            self._id = before[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {RUN_TAG: run.run_id}
            self._id = self._client.create_run(experiment, tags=tags, run_name=run.config.name).info.run_id
            params = [Param(name, value) for name, value in _flatten(_shown_config(run))]
            self._client.log_batch(self._id, params=params)

    def step(self, version: int, metrics: dict[str, float]) -> None:
        now_ms = int(time.time() * 1e3)
        batch = [self._metric(_NOT_ALLOWED.sub("_", name), value, now_ms, version) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=batch)

    evaluation = step

    def note_ending(self, ending: Ending) -> None:
        self._ending = ending

    def close(self) -> None:
        self._client.set_terminated(self._id, status=_MLFLOW_STATUS[self._ending])


def _flatten(table: dict[str, object], at: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", json.dumps(value)


_WANDB_EXIT_CODES = {Ending.FAILED: 1, Ending.INTERRUPTED: 130}


class Wandb(Reporter):
    """Logs metrics by step to Weights & Biases, which sends them from its own process.

    It keeps them if the network is down.
    """

    close_timeout_s = 60.0
    """It may have to upload what the network did not take during the run."""

    def __init__(self, settings: WandbConfig, run: Run[AnyConfig]):
        import wandb

        self._exit_code: int | None = None
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            id=run.run_id,
            resume="allow",  # the same id continues the same run
            name=run.config.name,
            dir=str(run.config.run_dir),
            config=_shown_config(run),
            settings=wandb.Settings(console="off"),  # the terminal's live table must not be captured as a log
        )
        # wandb's own step cannot go back, but a resumed run repeats its last steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": version, **metrics})

    evaluation = step

    def note_ending(self, ending: Ending) -> None:
        self._exit_code = _WANDB_EXIT_CODES.get(ending)

    def close(self) -> None:
        self._run.finish(exit_code=self._exit_code)


def open_tracker(tracker: TrackerConfig, run: Run[AnyConfig]) -> Reporter:
    """Opens the tracker's run for this run; a resumed run continues in the same one.

    Raises:
        InvalidInput: The tracker's package is not installed.
        PreconditionFailed: The tracker does not start, for example because there is no account or server.
    """
    try:
        if isinstance(tracker, WandbConfig):
            return Threaded("W&B", lambda: Wandb(tracker, run), Wandb.close_timeout_s)
        return Threaded("MLflow", lambda: Mlflow(tracker, run), Mlflow.close_timeout_s)
    except ImportError as error:
        raise InvalidInput(
            f"observability.trackers: {tracker.kind} cannot be imported ({error}); "
            f"pip install 'lockstep-rl[{tracker.kind}]'",
            field="observability.trackers",
        ) from error
    except Exception as error:  # its library may raise anything
        uri = f" (uri {tracker.uri})" if tracker.kind == "mlflow" and tracker.uri else ""
        why = without_passwords(f"{uri}: {type(error).__name__}: {error}")
        fix = f"; {fix}" if (fix := without_store(tracker)) else ""
        raise PreconditionFailed(f"observability.trackers: {tracker.kind} does not start{why}{fix}") from error
