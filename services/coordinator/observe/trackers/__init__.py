"""Opens experiment trackers. The library of each kind is an optional extra and is imported only when configured."""

from services.common.config.load import AnyConfig
from services.common.config.observability import TrackerConfig, WandbConfig
from services.common.errors import InvalidInput, PreconditionFailed
from services.coordinator.observe.trackers import mlflow, wandb
from services.coordinator.observe.trackers.threaded import Threaded
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.run import Run


def open_tracker(tracker: TrackerConfig, run: Run[AnyConfig]) -> Reporter:
    """Opens the tracker's run for this run; a resumed run continues in the same one.

    Raises:
        InvalidInput: The tracker's package is not installed.
        PreconditionFailed: The tracker does not start, for example because there is no account or server.
    """
    try:
        if isinstance(tracker, WandbConfig):
            return Threaded("W&B", lambda: wandb.Wandb(tracker, run), wandb._CLOSE_TIMEOUT_S)
        return Threaded("MLflow", lambda: mlflow.Mlflow(tracker, run), mlflow._CLOSE_TIMEOUT_S)
    except ImportError as error:
        raise InvalidInput(
            f"observability.trackers: {tracker.kind} cannot be imported ({error}); "
            f"pip install 'lockstep-rl[{tracker.kind}]'",
            field="observability.trackers",
        ) from error
    except Exception as error:  # its library may raise anything
        raise PreconditionFailed(
            f"observability.trackers: {tracker.kind} does not start: {type(error).__name__}: {error}"
        ) from error
