"""Says whether a run that is started again has nothing left to do, from its record alone."""

from collections.abc import Callable

from services.common.config.reading.any import AnyConfig
from services.common.counted import counted
from services.coordinator.observe.outcome import Outcome
from services.coordinator.runs.best import evaluations, is_stalled
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.run import Run


def outcome_if_finished(run: Run[AnyConfig], say: Callable[[str], None]) -> Outcome | None:
    """Returns the outcome of a run that has done its steps, and says so; None if a step or something else is due.

    Due is what the record does not have of the last step: its evaluation, its checkpoint or its export. A run that
    goes back to a checkpoint is not finished.
    """
    ledger, config = run.record.ledger, run.config
    version = ledger.last_finished() or 0
    stopping = config.evaluation.early_stopping
    is_early = stopping is not None and is_stalled(evaluations(ledger, version), stopping)
    last = version if is_early else run.num_steps
    if not 0 < last <= version or run.required_step is not None or _is_due(run, version, is_early=is_early):
        return None
    if is_early:
        say(f"{config.name} was ended by early stopping after step {version}; use another name")
    else:
        say(f"{config.name} already has its {counted(version, 'step')}; raise num_steps or use another name")
    path = run.record.export_path if config.checkpoint.export_at_end else None
    return Outcome.of(run, version, last, path)


def _is_due(run: Run[AnyConfig], version: int, *, is_early: bool) -> bool:
    settings, record = run.config.checkpoint, run.record
    is_saved = any(row["version"] == version for row in record.ledger.checkpoints(Kind.SAVED))
    must_save = run.checkpoint_due(version) or (is_early and settings.save_freq > 0)
    must_evaluate = run.eval_due(version) and not record.was_evaluated(version)
    must_export = settings.export_at_end and not record.is_exported(version)
    return must_evaluate or must_export or (must_save and not is_saved)
