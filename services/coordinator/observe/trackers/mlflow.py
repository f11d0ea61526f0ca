"""Reports to MLflow."""

import json
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator

from services.common.config.observability import MlflowConfig
from services.common.config.reading.any import AnyConfig
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.run import Run

log = logging.getLogger(__name__)

RUN_TAG = "lockstep_run_id"
_CLOSE_TIMEOUT_S = 30.0
# Characters that MLflow does not allow in a metric's name: pass@4 becomes pass_4.
_NOT_ALLOWED = re.compile(r"[^\w./ -]")


class Mlflow(Reporter):
    """Sends metrics by step from a thread, so that the loop never waits for the server."""

    def __init__(self, settings: MlflowConfig, run: Run[AnyConfig]):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, MlflowClient(tracking_uri=settings.uri)
        found = self._client.get_experiment_by_name(settings.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(settings.experiment)
        before = self._client.search_runs([experiment], f"tags.{RUN_TAG} = '{run.run_id}'")
        if before:
            self._id = before[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {RUN_TAG: run.run_id}
            self._id = self._client.create_run(experiment, tags=tags, run_name=run.config.name).info.run_id
            config = json.loads(run.config.model_dump_json())
            params = [Param(name, value) for name, value in _flat(config)]
            self._client.log_batch(self._id, params=params)
        self._calls: queue.SimpleQueue[tuple[str, Callable[[], object]] | None] = queue.SimpleQueue()
        # A daemon thread: the end of a run does not wait for MLflow's own retries, which take many minutes.
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._thread.start()

    def step(self, version: int, metrics: dict[str, float]) -> None:
        now_ms = int(time.time() * 1e3)
        batch = [self._metric(_NOT_ALLOWED.sub("_", name), value, now_ms, version) for name, value in metrics.items()]
        self._calls.put((f"the metrics of step {version}", lambda: self._client.log_batch(self._id, metrics=batch)))

    evaluation = step

    def close(self) -> None:
        self._calls.put(("the end of the run", lambda: self._client.set_terminated(self._id)))
        self._calls.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning(
                "MLflow did not answer for %g s; metrics.jsonl has the metrics that it is missing", _CLOSE_TIMEOUT_S
            )

    def _send(self) -> None:
        while next_call := self._calls.get():
            what, call = next_call
            try:
                call()
            except Exception as error:  # noqa: BLE001 an unreachable tracker must not end a run
                log.warning("MLflow did not accept %s (metrics.jsonl has all metrics): %s", what, error)


def _flat(table: dict[str, object], at: str = "") -> Iterator[tuple[str, str]]:
    """Yields dotted keys and their values as JSON."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", json.dumps(value)
