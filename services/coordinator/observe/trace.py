"""Traces a run: spans of the loop and of every call to the services that the run started."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from services.common.config.reading.load import AnyConfig
from services.common.rpc.server import INCARNATION
from services.common.telemetry.otel import Otel
from services.common.telemetry.trace import Trace, join
from services.coordinator.runs.reporter import Reporter


def trace_path(run_dir: Path, name: str) -> Path:
    """Returns the file for the spans of the process `name`, and creates its directory."""
    directory = run_dir / "trace"
    directory.mkdir(parents=True, exist_ok=True)
    return (directory / f"{name}.json").absolute()


class RunTrace(Reporter):
    """Records a span per step with the loop's phases in it. At the end, joins all spans of the run in trace.json."""

    def __init__(self, config: AnyConfig):
        self._run_dir = config.run_dir if config.trace else None
        path = trace_path(self._run_dir, "coordinator") if self._run_dir else ""
        endpoint, field = config.observability.otel_endpoint, "observability.otel_endpoint"
        otel = Otel(endpoint, "lockstep-coordinator", INCARNATION, field=field) if endpoint else None
        self._trace = Trace(path, "coordinator", otel)
        self._step, self._is_in_step = ExitStack(), False

    @contextmanager
    def phase(self, name: str, version: int) -> Iterator[None]:
        if (
            not self._is_in_step
        ):  # a step begins with the checkpoint and the evaluation of its version, if there are any
            self._step.enter_context(self._trace.span("step", version=version))
            self._is_in_step = True
        with self._trace.span(name, version=version):
            yield

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self._step.close()
        self._is_in_step = False

    def close(self) -> None:
        self._step.close()
        self._trace.close()
        if self._run_dir:
            join(sorted((self._run_dir / "trace").glob("*.json")), self._run_dir / "trace.json")
