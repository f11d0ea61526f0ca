"""Where a run's numbers go besides its own directory. Each kind's library is an extra, loaded when asked for."""

from services.common.config.any import AnyConfig
from services.common.config.observability import TrackerConfig, WandbConfig
from services.common.errors import InvalidInput, PreconditionFailed
from services.coordinator.observe.trackers.mlflow import Mlflow
from services.coordinator.observe.trackers.wandb import Wandb
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.run import Run


def open_tracker(tracker: TrackerConfig, run: Run[AnyConfig]) -> Reporter:
    """The tracker's run that is this run; a resumed run goes on with the one that it had.

    Raises:
        InvalidInput: Its package is not installed.
        PreconditionFailed: It does not start: no account, no server.
    """
    try:
        return Wandb(tracker, run) if isinstance(tracker, WandbConfig) else Mlflow(tracker, run)
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
