"""Where the time of a run goes, as spans of the loop and of every call to the services that it started."""

from contextlib import AbstractContextManager
from pathlib import Path

from services.common.trace import Trace, join
from services.coordinator.reporters import Reporter


def trace_path(run_dir: Path, name: str) -> Path:
    """Where the process `name` of a run keeps its spans."""
    directory = run_dir / "trace"
    directory.mkdir(parents=True, exist_ok=True)
    return (directory / f"{name}.json").absolute()


class RunTrace(Reporter):
    """Keeps the loop's phases; at the end all spans of the run are put into trace.json."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._trace = Trace(trace_path(run_dir, "coordinator"), "coordinator")

    def phase(self, name: str, version: int) -> AbstractContextManager[None]:
        return self._trace.span(name, version=version)

    def close(self) -> None:
        join(sorted((self._run_dir / "trace").glob("*.json")), self._run_dir / "trace.json")
