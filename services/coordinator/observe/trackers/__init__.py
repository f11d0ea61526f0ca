"""Where a run's numbers go besides its own directory. Each kind is an extra, imported when it is asked for."""

from importlib import import_module

from services.common.config.observability import TrackerConfig
from services.common.errors import InvalidInput, PreconditionFailed
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.run import Run

_KINDS = {"wandb": "Wandb", "mlflow": "Mlflow"}


def open_tracker(tracker: TrackerConfig, run: Run) -> Reporter:
    """The tracker's run that is this run; a resumed run goes on with the one that it had.

    Raises:
        InvalidInput: Its package is not installed.
        PreconditionFailed: It does not start: no account, no server.
    """
    module = import_module(f"services.coordinator.observe.trackers.{tracker.kind}")
    try:
        return getattr(module, _KINDS[tracker.kind])(tracker, run)
    except ImportError as error:
        raise InvalidInput(
            f"observability.trackers: {tracker.kind} cannot be imported ({error}); "
            f"pip install 'lockstep-rl[{tracker.kind}]'",
            field="observability.trackers",
        ) from error
    except Exception as error:  # whatever its library raises
        raise PreconditionFailed(
            f"observability.trackers: {tracker.kind} does not start: {type(error).__name__}: {error}"
        ) from error
