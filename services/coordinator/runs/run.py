"""A run in progress: its config, its version, its record, its clock and its checkpoints; and what restarts it."""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Generic

from lockstep.types.v1.types_pb2 import PolicyStamp
from typing_extensions import TypeVar

from services.common.config.load import AnyConfig
from services.common.config.operation import RestartConfig
from services.common.config.run import Config
from services.common.errors import DataLoss, LockstepError, PreconditionFailed, counted, described
from services.common.files import write_whole
from services.common.forks import Forks
from services.common.telemetry import within
from services.coordinator.runs.checkpoints import (
    Checkpoints,
    SavedModel,
    Versions,
    best_if_stalled,
    comparable_evaluations,
    require_metric,
)
from services.coordinator.runs.clock import Phase, StepClock
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.record import RunRecord
from services.coordinator.runs.reporter import Ending, Reporter, Reporters
from services.coordinator.runs.resume import Start, step_of

log = logging.getLogger(__name__)

# A run that failed does not wait longer for another process to let go of its ledger.
_FAILURE_PATIENCE_S = 10.0
_NO_LEARNING_RATE = "warning/learning_rate_is_0"

ConfigT = TypeVar("ConfigT", bound=AnyConfig, covariant=True, default=Config)


class Run(Generic[ConfigT]):
    """Decides when checkpoints and evaluations are due, and notifies the reporters."""

    def __init__(self, config: ConfigT, start: Start):
        self.config, self.run_id = config, start.run_id
        self.num_steps = config.num_steps or 0  # a supervised run may count epochs: sft.loop.use_rows
        self.resume_from, self.resume_critic_from = start.checkpoint, start.critic_checkpoint
        self.required_step = start.required_step
        self.stopping = self.is_stalled = self.has_begun = self.is_closed = False
        self.version = 0
        self.ending: Ending | None = None
        """How the session ended, if it did not end by itself."""
        self.reporters = Reporters()
        self.record, self.clock = RunRecord(config.run_dir, start.ledger), StepClock()
        warmup_steps = config.critic.warmup_steps if config.critic else 0
        self.checkpoints = Checkpoints(config.run_dir, start.ledger, config.checkpoint, warmup_steps)
        if not (config.run_dir / "config.json").exists():
            self._write_config()

    @property
    def first_version(self) -> int:
        """Returns the version of the checkpoint that the run resumes from; 0 if it starts from the model."""
        return step_of(self.resume_from) if self.resume_from else 0

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Measures the block as `phase`, in one span for the clock, the trace and the reporters."""
        self.reporters.tell(lambda reporter: reporter.begin_phase(phase.value, self.version))
        with ExitStack() as ended, within(step=self.version), self.clock.measure(phase, self.version) as span:
            # Called last, when the span has its seconds.
            ended.callback(self.reporters.tell, lambda reporter: reporter.end_phase(phase.value, span.seconds))
            yield

    def last_finished(self, trainer_version: int, last_batch_id: str) -> int:
        """Returns the newest finished step: the trainer's version, or the step before.

        It is the step before if the coordinator ended between sending the trainer's last batch and recording the step.
        """
        before = trainer_version - 1
        is_recorded = self.record.ledger.last_finished() != before or last_batch_id != self.batch_id(before)
        return trainer_version if is_recorded else before

    def require_held(self, trainer_version: int) -> None:
        """Raises PreconditionFailed if the trainer has kept a state of this run that the run does not go on from.

        It may be ahead of the checkpoint that the run resumes from, unless the run goes back to that one.
        """
        step = self.first_version
        if trainer_version < step or (trainer_version > step and self.required_step is not None):
            go_on = "omit resume" if trainer_version > step else "set resume to the checkpoint of that step"
            raise PreconditionFailed(
                f"resume: {self.resume_from} is of step {step}, but the trainer has this run open after step "
                f"{trainer_version}; restart the trainer, or {go_on} to continue from there",
                field="resume",
            )

    def begin(self, version: int, reporters: Sequence[Reporter]) -> None:
        """Starts the loop after step `version`. Later steps in the record will be repeated.

        Checkpoints of later steps are left only here: a session that did not come so far has no effect on the next.
        """
        self.checkpoints.leave_later(version)
        self.record.ledger.record(Kind.BEGUN, version)
        self._write_config()  # only now that all services have accepted it
        self.has_begun = True
        self._end_if_stalled(version)
        self.version = version
        self.reporters.add(reporters)
        self.clock.restart()

    def _write_config(self) -> None:
        write_whole(self.config.run_dir / "config.json", self.config.model_dump_json(indent=1))

    def describe_start(self, version: int, trainer_version: int) -> str:
        if trainer_version > version:
            applied = f"resuming with step {trainer_version}, which the trainer has applied"
            return f"{applied} and the record does not have yet"
        if version:
            return f"resuming after step {version}" + (f", from {self.resume_from}" if self.resume_from else "")
        if self.record.ledger.last(Kind.FINISHED):
            batches = ", on the recorded batches" if self.record.ledger.last(Kind.COLLECTED) else ""
            return f"no checkpoint was saved: training again from step 1{batches}"
        return f"training from {self.config.model}"

    def batch_id(self, version: int) -> str:
        """Returns the id of the batch that updates `version`; it is the same after a restart."""
        return f"{self.run_id}/{version}"

    def unfinished_stamp(self) -> PolicyStamp:
        """Returns the stamp of the recorded batch that the trainer has applied and whose step is not finished."""
        stamp = self.record.recorded_stamp(self.version)
        if self.record.recorded_batch(self.version, stamp) is None:
            raise DataLoss(
                f"the trainer has applied step {self.version + 1}, which is not finished in the record, and its batch "
                f"in {self.config.run_dir} is missing or damaged: restart the trainer, to resume from a checkpoint"
            )
        return stamp

    def checkpoint_due(self, version: int) -> bool:
        """Returns whether `version`, if it is a finished step of this run, must be saved."""
        is_due = _due(version, self.config.checkpoint.save_freq, self.num_steps)
        return is_due and self.record.ledger.last(Kind.FINISHED, version) is not None

    def adopt_checkpoint(self, trainer_version: int) -> None:
        """Records the newest due checkpoint before the trainer's version, if only its record is missing."""
        due = next((version for version in range(trainer_version - 1, 0, -1) if self.checkpoint_due(version)), None)
        if due is not None:
            self.checkpoints.adopt(due, self.batch_id(due - 1))

    async def end_checkpoints(self, models: Sequence[SavedModel]) -> None:
        """Saves a final checkpoint if the run was stopped between two or ended early. Waits until all are saved."""
        is_between = self.stopping and 0 < self.version < self.num_steps and not self.checkpoint_due(self.version)
        if is_between or (self.is_stalled and self.config.checkpoint.save_freq):
            await self.checkpoints.begin(models, self.version)
        await self.checkpoints.finish()

    def eval_due(self, version: int) -> bool:
        settings = self.config.evaluation
        if version == 0:
            return settings.eval_before_train and bool(self.config.data.eval)
        return _due(version, settings.eval_freq, self.num_steps)

    def finish_evaluation(self, version: int, metrics: dict[str, float], scored: Versions | None = None) -> None:
        """Reports and records an evaluation, whose time no step has. Ends the run if early stopping says so.

        `scored` has the versions of scorers and environment, if the samples have rewards.
        """
        keep_best, early_stopping = self.config.checkpoint.keep_best, self.config.evaluation.early_stopping
        if keep_best:
            require_metric(metrics, keep_best, "checkpoint.keep_best.metric")
        if early_stopping:
            require_metric(metrics, early_stopping, "evaluation.early_stopping.metric")
        reported = metrics | {"time/evaluating_s": self.clock.take(Phase.EVALUATING)}
        self.reporters.tell(lambda reporter: reporter.evaluation(version, reported))
        if scored:
            self.record.ledger.record(Kind.SCORED, version, **scored)
        self.record.ledger.record(Kind.EVALUATED, version, **metrics)
        self._end_if_stalled(version)

    def _end_if_stalled(self, version: int) -> None:
        """Makes `version` the last step if early stopping says so; reads only the record, so it holds on resuming."""
        config, ledger = self.config.evaluation.early_stopping, self.record.ledger
        if config is None:
            return
        rows = comparable_evaluations(ledger, version)
        best = best_if_stalled(rows, config)
        if best is None:
            return
        metric, best_version, best_value = config.metric, best["version"], best[config.metric]
        self.num_steps, self.is_stalled = version, True
        if ledger.last(Kind.STOPPED, version) is None:
            numbers = {"value": rows[-1][metric], "best_version": best_version, "best_value": best_value}
            ledger.record(Kind.STOPPED, version, metric=metric, **numbers)
        log.warning(
            "early stopping after step %d: %s was best after step %d, with %g, and not better in %s since",
            *(version, metric, best_version, best_value, counted(config.patience, "evaluation")),
        )

    def finish_step(self, version: int, metrics: dict[str, float]) -> None:
        """Reports and records the metrics of a step, and starts the next one.

        The record comes last: a resumed run removes the lines of a step that is not in it, and finishes it again.
        """
        if metrics.get("train/lr") == 0:
            metrics = metrics | self._warn_of_learning_rate(version)
        self.reporters.tell(lambda reporter: reporter.step(version, metrics))
        self.record.ledger.record(Kind.FINISHED, version, **metrics)
        self.record.batch_is_from_disk = False
        self.version = version
        self.clock.restart()

    def _warn_of_learning_rate(self, version: int) -> dict[str, float]:
        before = self.record.ledger.last(Kind.FINISHED, self.version) or {}
        if _NO_LEARNING_RATE not in before:
            log.warning(
                "step %d: the learning rate is 0 from here on, so nothing is learned: stop the run, or resume a "
                "checkpoint under another name, with larger trainer.optim.decay_steps or trainer.optim.min_lr_ratio",
                version,
            )
        return {_NO_LEARNING_RATE: 1.0}

    def record_failure(self, error: Exception) -> None:
        """Records the error that ends this session. If the ledger does not take it soon, only the log has it."""
        self.ending, (reason, message) = Ending.FAILED, described(error)
        # Only for its log: the caller shows it.
        log.info("failed: %s: %s", reason, message, exc_info=None if isinstance(error, LockstepError) else error)
        self.record.ledger.set_patience(_FAILURE_PATIENCE_S)
        try:
            self.record.ledger.record(Kind.FAILED, self.version, reason=reason, message=message)
        except LockstepError as failure:
            log.warning("the failure of the run is not recorded: %s", failure.message)

    def close(self) -> None:
        """Closes the reporters and the ledger. A save in progress is not recorded."""
        self._end()
        self._close_reporters()
        self.record.ledger.close()

    async def aclose(self) -> None:
        """Does what `close` does, and waits for the reporters in a thread, because a tracker may take a minute."""
        self._end()
        try:
            await asyncio.to_thread(self._close_reporters)
        finally:
            self.record.ledger.close()

    def _end(self) -> None:
        self.is_closed = True
        self.checkpoints.abandon()
        self.clock.close()

    def _close_reporters(self) -> None:
        is_cut = self.stopping and self.version < self.num_steps
        ending = self.ending or (Ending.INTERRUPTED if is_cut else Ending.FINISHED)
        if self.has_begun:
            log.info("session %s after step %d of %d", ending.value, self.version, self.num_steps)
        self.reporters.tell(lambda reporter: reporter.note_ending(ending))
        self.reporters.tell(lambda reporter: reporter.close())


def _due(version: int, freq: int, num_steps: int) -> bool:
    return freq > 0 and (version % freq == 0 or version == num_steps)


class Restarts:
    """Counts the restarts of the services that a run has started, and keeps what a repeated session needs."""

    def __init__(self, config: RestartConfig, clock: Callable[[], float] = time.monotonic):
        self._config, self._clock = config, clock
        self.run: Run[AnyConfig] | None = None
        self.forks: Forks | None = None
        """What the services are forked from; None if each session has its own."""
        self.added: list[str] = []
        """Replicas that joined a session after its start; the next session has them too."""
        self.removed: list[str] = []
        """Replicas that left a session; the next session does not have them."""
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)

    @property
    def may_resume(self) -> bool:
        """Whether to repeat a session: its services could be opened, and nobody has asked it to stop."""
        return self.run is not None and self.run.has_begun and not self.run.stopping

    def take(self, service: str) -> bool:
        """Returns whether `service` may be started again, and counts it if so."""
        now, times = self._clock(), self._times[service]
        while times and times[0] <= now - self._config.window_s:
            times.popleft()
        if len(times) >= self._config.max:
            return False
        times.append(now)
        return True
