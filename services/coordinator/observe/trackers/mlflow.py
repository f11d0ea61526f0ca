"""Reports to MLflow."""

import json
import re
import time
from collections.abc import Iterator

from services.common.config.load import AnyConfig
from services.common.config.observability import MlflowConfig
from services.coordinator.runs.reporter import Ending, Reporter
from services.coordinator.runs.run import Run

RUN_TAG = "lockstep_run_id"
_CLOSE_TIMEOUT_S = 30.0
# Characters that MLflow does not allow in a metric's name: pass@4 becomes pass_4.
_NOT_ALLOWED = re.compile(r"[^\w./ -]")
_STATUS = {Ending.FAILED: "FAILED", Ending.INTERRUPTED: "KILLED"}


class Mlflow(Reporter):
    """Sends metrics by step. Its methods wait for the server."""

    def __init__(self, settings: MlflowConfig, run: Run[AnyConfig]):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client, self._ending = Metric, MlflowClient(tracking_uri=settings.uri), Ending.FINISHED
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

    def step(self, version: int, metrics: dict[str, float]) -> None:
        now_ms = int(time.time() * 1e3)
        batch = [self._metric(_NOT_ALLOWED.sub("_", name), value, now_ms, version) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=batch)

    evaluation = step

    def note_ending(self, ending: Ending) -> None:
        self._ending = ending

    def close(self) -> None:
        if status := _STATUS.get(self._ending):
            self._client.set_terminated(self._id, status=status)
        else:
            self._client.set_terminated(self._id)


def _flat(table: dict[str, object], at: str = "") -> Iterator[tuple[str, str]]:
    """Yields dotted keys and their values as JSON."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", json.dumps(value)
