"""Runs the SFT loop: takes the next rows and trains on them. It needs no rollout and no reward service.

Order and resumption are as exact as in RL: a batch names the version that it is for, and the trainer applies it once,
to that version.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.config.layout import samples_at_once
from services.common.config.sft import SftConfig
from services.coordinator.clients.trainer import Trainer
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.run import Run
from services.coordinator.sft.rows import Example, SftDataset, digest_of, to_table


@dataclass(frozen=True)
class SftData:
    """Rows to train on, and held-out rows by set name."""

    train: SftDataset
    held_out: Mapping[str, Sequence[Example]]


class SftTrainer(Trainer):
    """Calls the trainer with batches that were not sampled from the policy; uses temperature 1."""

    async def nll(self, batch: pa.Table) -> tuple[float, int]:
        """Returns the negative log-likelihood in nats, summed over the unmasked tokens of `batch`, and their number."""
        logprobs = pc.list_flatten((await self.forward(batch))["old_logprobs"]).filter(
            pc.list_flatten(batch["loss_mask"])
        )
        return -pc.sum(logprobs.cast(pa.float64())).as_py(), len(logprobs)


def use_rows(run: Run[SftConfig], data: SftDataset, held_out: Mapping[str, Sequence[Example]] | None = None) -> None:
    """Records the rows before the first step and sets `run.num_steps`, which may depend on the number of training rows.

    Raises:
        PreconditionFailed: The run was started with other rows.
    """
    others = {f"data.eval.{name}": digest_of(rows) for name, rows in (held_out or {}).items()}
    run.record.use_data(data.digest, others)
    run.record.ledger.record(Kind.COLLECTED, dataset=data.digest, rows=len(data))
    run.num_steps = run.config.num_steps or data.num_steps(run.config.num_epochs or 0)


def step_metrics(run: Run[SftConfig], trained: Mapping[str, float], batch: pa.Table) -> dict[str, float]:
    """Returns the metrics of the current step: of its batch, its update (`trained`) and its timing."""
    times = run.clock.metrics()
    num_tokens = sum(pc.sum(pc.list_value_length(batch[name])).as_py() for name in ("prompt_tokens", "tokens"))
    return {
        "batch/samples": float(batch.num_rows),
        "batch/tokens": float(num_tokens),
        "batch/trained_tokens": float(pc.sum(pc.list_flatten(batch["loss_mask"])).as_py()),
        **{f"train/{name}": value for name, value in trained.items()},
        **times,
        "time/tokens_per_s": num_tokens / times["time/step_s"],
    }


async def train(run: Run[SftConfig], data: SftData, trainer: SftTrainer) -> None:
    """Trains from `run.version` to `run.num_steps` or until the run is stopped.

    If the trainer is a step ahead, the coordinator ended before it recorded that step; it is finished first.
    """
    version, trainer_version = run.version, trainer.opened.version
    run.adopt_checkpoint(trainer_version)
    if version == trainer_version:
        await _save_and_evaluate(run, data, trainer, version)

    while version < trainer_version or (version < run.num_steps and not run.stopping):
        batch, stamp = data.train.batch(version), PolicyStamp(version=version)
        with run.phase(Phase.TRAINING):
            version, trained = await trainer.train(batch, run.batch_id(version), stamp)
        await run.record.ledger.free()
        run.finish_step(version, step_metrics(run, trained, batch))
        await _save_and_evaluate(run, data, trainer, version)
    with run.phase(Phase.CHECKPOINTING):
        await run.end_checkpoints([trainer])


async def _save_and_evaluate(run: Run[SftConfig], data: SftData, trainer: SftTrainer, version: int) -> None:
    """Saves and evaluates `version`, if this is due and not recorded yet."""
    if run.checkpoint_due(version):
        await run.checkpoints.begin([trainer], version)
    if run.eval_due(version) and not run.record.was_evaluated(version):
        await evaluate(run, data.held_out, trainer, version)
    with run.phase(Phase.CHECKPOINTING):
        await run.checkpoints.finish()  # otherwise the next update could come before the save starts


async def evaluate(
    run: Run[SftConfig], held_out: Mapping[str, Sequence[Example]], trainer: SftTrainer, version: int
) -> None:
    """Computes the mean loss per held-out token, `eval/<set>/nll`, and its exponential, `eval/<set>/perplexity`."""
    metrics: dict[str, float] = {}
    with run.phase(Phase.EVALUATING):
        for name, rows in held_out.items():
            losses = [await trainer.nll(part) for part in _parts(run, rows, version)]
            nll = sum(loss for loss, _ in losses) / sum(num_tokens for _, num_tokens in losses)
            metrics |= {f"eval/{name}/nll": nll, f"eval/{name}/perplexity": float(np.exp(nll))}
    await run.record.ledger.free()
    run.finish_evaluation(version, metrics)


def _parts(run: Run[SftConfig], rows: Sequence[Example], version: int) -> Iterator[pa.Table]:
    """Yields batches of `samples_per_step` held-out rows, padded with masked rows so that every rank has one."""
    size, at_once = run.config.data.samples_per_step, samples_at_once(run.config.trainer)
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        filler = replace(part[0], loss_mask=np.zeros_like(part[0].loss_mask))
        yield to_table([*part, *[filler] * (-len(part) % at_once)], version=version)
