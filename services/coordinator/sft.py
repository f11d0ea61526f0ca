"""Runs an SFT config for `lockstep sft`: takes the next rows and trains on them. The trainer is the only service.

Order and resumption are as exact as in RL: a batch names the version that it is for, and the trainer applies it once,
to that version.
"""

import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lockstep.types.v1.types_pb2 import PolicyStamp
from rich.console import Console

from services.common.config.layout import samples_at_once
from services.common.config.sft import SftConfig
from services.coordinator.clients.trainer import Trainer
from services.coordinator.data.prompts import load_from_card, load_if_local
from services.coordinator.data.supervised import Example, SftDataset, SftFile, digest_of, to_table
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.opening import close_run, finish, outcome_if_finished
from services.coordinator.fleet.running import Sessions, recorded_run
from services.coordinator.observe.frontend import Outcome, cancel_on_sigterm, show, stop_on_signal
from services.coordinator.observe.reporters import files
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.reporter import Reporter, in_order
from services.coordinator.runs.run import Run
from services.coordinator.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftData:
    train: SftDataset
    held_out: Mapping[str, Sequence[Example]]
    tokenizer: Tokenizer


class SftTrainer(Trainer):
    """Calls the trainer with batches that were not sampled from the policy; uses temperature 1."""

    async def nll(self, batch: pa.Table) -> tuple[float, int]:
        """Returns the negative log-likelihood in nats, summed over the unmasked tokens of `batch`, and their number."""
        logprobs = pc.list_flatten((await self.forward(batch))["old_logprobs"]).filter(
            pc.list_flatten(batch["loss_mask"])
        )
        return -pc.sum(logprobs.cast(pa.float64())).as_py(), len(logprobs)


def use_rows(run: Run[SftConfig], data: SftData) -> None:
    """Records the rows before the first step and sets `run.num_steps`, which may depend on the number of rows.

    Raises:
        PreconditionFailed: The run has trained or evaluated on other rows.
    """
    others = {f"data.eval.{name}": digest_of(rows) for name, rows in data.held_out.items()}
    run.record.use_data(data.train.digest, others)
    run.num_steps = run.config.num_steps or data.train.num_steps(run.config.num_epochs or 0)


def step_metrics(run: Run[SftConfig], trained: Mapping[str, float], batch: pa.Table) -> dict[str, float]:
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
        if not run.record.ledger.last(Kind.COLLECTED):  # from here on, the run goes on with these rows only
            run.record.ledger.record(Kind.COLLECTED, dataset=data.train.digest, rows=len(data.train))
        with run.phase(Phase.TRAINING):
            version, trained = await trainer.train(batch, run.batch_id(version), stamp)
        await run.record.ledger.free()
        run.finish_step(version, step_metrics(run, trained, batch))
        await _save_and_evaluate(run, data, trainer, version)
    with run.phase(Phase.CHECKPOINTING):
        await run.end_checkpoints([trainer])


async def _save_and_evaluate(run: Run[SftConfig], data: SftData, trainer: SftTrainer, version: int) -> None:
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
            losses = [await trainer.nll(part) for part in _held_out_batches(run, rows, version)]
            nll = sum(loss for loss, _ in losses) / sum(num_tokens for _, num_tokens in losses)
            metrics |= {f"eval/{name}/nll": nll, f"eval/{name}/perplexity": float(np.exp(nll))}
    await run.record.ledger.free()
    run.finish_evaluation(version, metrics)


def _held_out_batches(run: Run[SftConfig], rows: Sequence[Example], version: int) -> Iterator[pa.Table]:
    """Yields batches of `samples_per_step` held-out rows, padded with masked rows so that every rank has one."""
    size, at_once = run.config.data.samples_per_step, samples_at_once(run.config.trainer)
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        filler = replace(part[0], loss_mask=np.zeros_like(part[0].loss_mask))
        yield to_table([*part, *[filler] * (-len(part) % at_once)], version=version)


_FILES = {
    "metrics.jsonl, tensorboard/": "metrics of every step",
    "ledger.sqlite, logs/": "every decision; the trainer's log",
    "model/": "the trained model, for `model` of an RL run or for vLLM",
}


async def run_session(config: SftConfig, external: Addresses, console: Console) -> Outcome:
    """Runs `config` until all steps are done or Ctrl-C stops it.

    If the trainer was started here and dies, it is started again and the run resumes, as far as `restart` allows.

    Raises:
        LockstepError: The first failure of any part.
    """
    cancel_on_sigterm()
    async with Sessions(config, external) as sessions:
        loaded = load_data(config, external)
        while True:
            with sessions.repeating():
                return await _run_once(sessions, console, loaded)


async def _run_once(sessions: Sessions[SftConfig], console: Console, data: SftData | None) -> Outcome:
    config = sessions.config
    async with recorded_run(config, console) as run:
        if data is not None:
            use_rows(run, data)
        if outcome := outcome_if_finished(run, partial(console.print, soft_wrap=True)):
            return outcome
        async with (
            sessions.running_services(run, ["trainer"]) as addresses,
            _open_trainer(run, addresses, console) as trainer,
        ):
            run.require_held(trainer.opened.version)
            version = run.last_finished(trainer.opened.version, trainer.opened.last_batch_id)
            if data is None:
                data = load_from_card(config, trainer.opened.model_card, _load)
                use_rows(run, data)
            start = run.describe_start(version, trainer.opened.version)
            console.print(start, soft_wrap=True, highlight=False)
            log.info(start)  # the terminal may be gone when it is needed
            run.begin(version, [*files(run, version), Lines(console, run.num_steps)])
            stop_on_signal(run, console)
            await train(run, data, trainer)
            return await finish(run, trainer)


def load_data(config: SftConfig, external: Addresses) -> SftData | None:
    """Reads the run's rows. Returns None if only the trainer's host has the model, whose tokenizer is needed."""
    return load_if_local(config, _load, model_is_remote=bool(external.trainer))


@asynccontextmanager
async def _open_trainer(run: Run[SftConfig], addresses: Addresses, console: Console) -> AsyncIterator[SftTrainer]:
    where = f"run {run.run_id} in {run.config.run_dir}"
    console.print(f"{where}: opening trainer {addresses.trainer}", soft_wrap=True)
    trainer = SftTrainer(addresses.trainer, run.config, addresses.transport)
    try:
        await trainer.open(run.run_id, run.resume_from)
        yield trainer
    finally:
        await trainer.close()
    await close_run(run, addresses)


def show_outcome(outcome: Outcome, console: Console) -> None:
    show(outcome, _FILES, console, number=".4g")


class Lines(Reporter):
    """Prints a line for every step and evaluation."""

    def __init__(self, console: Console, num_steps: int):
        self._console, self._num_steps = console, num_steps

    def step(self, version: int, metrics: dict[str, float]) -> None:
        shown = f"loss {metrics['train/loss']:.4f}  grad norm {metrics['train/grad_norm']:.3f}"
        shown += f"  lr {metrics['train/lr']:.2e}  {metrics['time/tokens_per_s']:.0f} tokens/s"
        self._print(f"step {version:>{len(str(self._num_steps))}} of {self._num_steps}  {shown}")

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        shown = "  ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in in_order(metrics).items())
        self._print(f"held-out after step {version}  {shown}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)


def _load(config: SftConfig, tokenizer: Tokenizer) -> SftData:
    train_data = SftDataset.load(config.data, tokenizer, seed=config.seed)
    return SftData(train_data, SftFile.held_out(config.data, tokenizer), tokenizer)
