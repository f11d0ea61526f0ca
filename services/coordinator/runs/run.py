"""One run: its files, its decisions, its clock. What the loop asks for by name."""

import asyncio
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.config.run import Config
from services.common.errors import PreconditionFailed
from services.common.telemetry.context import within
from services.coordinator.observe.reporters import Reporter, in_order
from services.coordinator.rl.advantages.controller import coef_after, record
from services.coordinator.rl.metrics import batch_metrics
from services.coordinator.rl.selection import Selected
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.resume import CHECKPOINTS, CRITIC_CHECKPOINTS, Start
from services.coordinator.services.clients.trainer import Model


class Phase(StrEnum):
    """What the loop is doing."""

    OPENING = "opening"
    GENERATING = "generating"
    TRAINING = "training"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"
    EVALUATING = "evaluating"


class Run:
    """Keeps what happened and says what is due."""

    def __init__(self, config: Config, start: Start):
        self.config, self.run_id = config, start.run_id
        self.resume_from, self.resume_critic_from = start.checkpoint, start.critic_checkpoint
        self.stopping = False
        self.version = 0
        self.watchers: Sequence[Reporter] = ()
        self.reporters: Sequence[Reporter] = ()
        self._ledger = start.ledger
        self._saving: asyncio.Task[None] | None = None
        self._restart_clock()
        (config.run_dir / "batches").mkdir(exist_ok=True)
        (config.run_dir / "config.json").write_text(config.model_dump_json(indent=1))

    @property
    def num_steps(self) -> int:
        """Steps to make in all."""
        return self.config.num_steps

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Times what the loop does and tells the reporters."""
        with ExitStack() as stack:
            stack.enter_context(within(step=self.version))
            for reporter in self.reporters:
                stack.enter_context(reporter.phase(phase.value, self.version))
            begin = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[phase] += time.perf_counter() - begin

    def begin(self, version: int, reporters: Sequence[Reporter]) -> None:
        """The services hold `version`; what was recorded beyond it will be done again."""
        self.version, self.reporters = version, (*self.watchers, *reporters)
        self._restart_clock()

    def where_it_goes_on(self, version: int) -> str:
        """For a person, when the services hold `version`."""
        if version:
            return f"going on after step {version}" + (f", from {self.resume_from}" if self.resume_from else "")
        if self._ledger.last(Kind.FINISHED):
            return "no checkpoint was saved: training again from step 1, on the batches that were recorded"
        return f"training from {self.config.model}"

    def batch_id(self, stamp: PolicyStamp) -> str:
        """Names the batch that is drawn from `stamp`, the same after a restart."""
        return f"{self.run_id}/{stamp.version}"

    def next_epoch(self, num_replicas: int) -> int:
        """A weight-group epoch above all before it."""
        return self._ledger.record(Kind.EPOCH, num_replicas=num_replicas)

    def record_published(self, stamp: PolicyStamp) -> None:
        """`stamp` is served."""
        self._ledger.record(Kind.PUBLISHED, stamp.version, digest=stamp.digest)

    def success_rates(self, step: int, window: int | None) -> dict[str, float]:
        """See Ledger.success_rates."""
        return self._ledger.success_rates(step, window)

    def kl_coef(self, version: int) -> float:
        """Coefficient of the KL penalty in the reward of the batch that is drawn from `version`."""
        before = self._ledger.last(Kind.COLLECTED, version - 1) or {}
        return coef_after(before.get("kl"), self.config.advantage.kl)

    def record_batch(self, batch: pa.Table, stamp: PolicyStamp, dataset_digest: str, selected: Selected) -> pa.Table:
        """Keeps a step's batch, and how it was chosen, on disk before it is trained on."""
        path = self._batch_path(stamp.version)
        partial = path.with_suffix(".partial")  # never a torn file under the name that is read
        with partial.open("wb") as file:
            pq.write_table(batch, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        settings = self.config.advantage
        kl = record(batch, self.kl_coef(stamp.version), settings.kl) if settings.needs_reference else None
        with self._ledger.together():
            self._ledger.record(Kind.SELECTED, stamp.version, **selected.decision)
            self._ledger.keep_outcomes(stamp.version, selected.outcomes)
            self._ledger.record(
                Kind.COLLECTED, stamp.version, digest=stamp.digest, sha256=_sha256(path), dataset=dataset_digest, kl=kl
            )
        return batch

    async def recorded_batch(self, stamp: PolicyStamp) -> pa.Table | None:
        """The batch that was drawn from exactly `stamp` before a restart, if there is one, whole.

        A checkpoint in progress is finished first: nothing else keeps the training from overtaking it.
        """
        recorded, path = self._ledger.last(Kind.COLLECTED, stamp.version), self._batch_path(stamp.version)
        if not recorded or recorded["digest"] != stamp.digest or not path.is_file():
            return None
        await self.finish_checkpoint()
        self._is_recorded = _sha256(path) == recorded["sha256"]
        return pq.read_table(path) if self._is_recorded else None

    def set_aside_export(self, path: Path) -> bool:
        """Whether `path` has the policy of this version; that of another is kept under another name."""
        exported = self._ledger.last(Kind.EXPORTED) or {"version": None}
        if path.exists() and exported["version"] != self.version:
            path.rename(path.with_name(f"{path.name}-{exported['version'] or 'before'}-{uuid.uuid4().hex[:8]}"))
        return path.exists()

    def record_export(self, path: Path) -> None:
        """The policy of this version is there."""
        self._ledger.record(Kind.EXPORTED, self.version, path=str(path))

    def use(self, dataset_digest: str) -> None:
        """Takes note of the training data, before the first step.

        Raises:
            PreconditionFailed: The run was begun with other data.
        """
        before = self._ledger.last(Kind.COLLECTED)
        if before and before["dataset"] != dataset_digest:
            raise PreconditionFailed(
                f"data.train is not what {self.config.run_dir} was begun with (rows, template or tokenizer differ); "
                "use that again, or another name"
            )

    def checkpoint_due(self, version: int) -> bool:
        """Whether `version` is to be saved."""
        return _due(version, self.config.checkpoint.save_freq, self.num_steps)

    async def begin_checkpoint(self, models: Sequence[Model], version: int) -> None:
        """Starts to save `models`, the policy last, while the run goes on; the checkpoint before must have been saved.

        Raises:
            LockstepError: As `finish_checkpoint`.
        """
        await self.finish_checkpoint()
        self._saving = asyncio.create_task(self._save(models, version))

    async def end_checkpoints(self, models: Sequence[Model]) -> None:
        """Saves a run that was stopped where it is, and waits for what is being saved.

        Raises:
            LockstepError: As `finish_checkpoint`.
        """
        if self.stopping and 0 < self.version < self.num_steps and not self.checkpoint_due(self.version):
            await self.begin_checkpoint(models, self.version)
        await self.finish_checkpoint()

    async def finish_checkpoint(self) -> None:
        """Waits for the checkpoint that is being saved, if there is one.

        Raises:
            LockstepError: It could not be saved.
        """
        if self._saving is not None:
            await self._saving
            self._saving = None

    def check_checkpoint(self) -> None:
        """Raises what `finish_checkpoint` would, if that is known already."""
        if self._saving is not None and self._saving.done():
            self._saving.result()

    async def _save(self, models: Sequence[Model], version: int) -> None:
        settings, warmup_steps = self.config.checkpoint, self.config.critic.warmup_steps if self.config.critic else 0
        for model in models:
            if model.name == "critic":
                await self._save_one(model, version, version + warmup_steps, (Kind.SAVED_CRITIC, CRITIC_CHECKPOINTS))
            else:
                await self._save_one(model, version, version, (Kind.SAVED, CHECKPOINTS))
        # Not before all are saved: a policy's newest checkpoint needs the critic's of the same step.
        await self._delete_all_but(settings.max_critic_ckpts_to_keep, Kind.SAVED_CRITIC)
        await self._delete_all_but(settings.max_ckpts_to_keep, Kind.SAVED)

    async def _save_one(self, model: Model, step: int, version: int, where: tuple[Kind, str]) -> None:
        """Saves a model's `version` and records it."""
        kind, directory = where
        path = str((self.config.run_dir / directory / f"step-{step:06d}").absolute())
        recorded = [row["path"] for row in self._ledger.checkpoints(kind)]
        if path in recorded and Path(path).exists():  # a resumed run comes by again
            return
        shutil.rmtree(path, ignore_errors=True)  # saved for a coordinator that did not live to record it
        digest = await model.save(path, version)
        self._ledger.record(kind, step, path=path, manifest_digest=digest)

    async def _delete_all_but(self, num_kept: int, kind: Kind) -> None:
        newest_first = dict.fromkeys(row["path"] for row in reversed(self._ledger.checkpoints(kind)))
        for old in list(newest_first)[num_kept:]:
            self._ledger.record(Kind.DELETED, path=old)
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)

    def eval_due(self, version: int) -> bool:
        """Whether `version` is to be evaluated."""
        settings = self.config.evaluation
        if version == 0:
            return settings.eval_before_train and bool(self.config.data.eval)
        return _due(version, settings.eval_freq, self.num_steps)

    def evaluated(self, version: int) -> bool:
        """Whether `version` was evaluated before a restart."""
        return self._ledger.last(Kind.EVALUATED, version) is not None

    def keep_evaluation(self, name: str, samples: pa.Table, stamp: PolicyStamp) -> None:
        """Keeps the samples of an evaluation for whoever wants to read them."""
        directory = self.config.run_dir / "evaluations"
        directory.mkdir(exist_ok=True)
        pq.write_table(samples, directory / f"{name}-step-{stamp.version:06d}.parquet", compression="zstd")

    def finish_evaluation(self, version: int, metrics: dict[str, float]) -> None:
        """Keeps and reports the numbers of an evaluation."""
        self._ledger.record(Kind.EVALUATED, version, **metrics)
        seconds, self._seconds[Phase.EVALUATING] = self._seconds[Phase.EVALUATING], 0.0
        self._step_began += seconds  # the next step takes none of it
        for reporter in self.reporters:
            reporter.evaluation(version, metrics | {"time/evaluating_s": seconds})

    def finish_step(self, version: int, trained: dict[str, float], batch: pa.Table) -> None:
        """Keeps and reports the numbers of a step; the next one begins."""
        metrics = batch_metrics(batch) | {f"train/{name}": value for name, value in trained.items()} | self._times()
        metrics |= (self._ledger.last(Kind.SELECTED, self.version) or {}).get("metrics", {})
        kl = (self._ledger.last(Kind.COLLECTED, self.version) or {}).get("kl")
        metrics |= {"kl/coef": kl["kl_coef"], "kl/penalised_per_sample": kl["kl_per_sample"]} if kl else {}
        if not self._is_recorded:
            metrics["time/tokens_per_s"] = metrics["batch/tokens"] / max(metrics["time/generating_s"], 1e-9)
        self._keep_step(version, metrics)

    def evaluations(self) -> list[dict[str, float]]:
        """All evaluations so far, oldest first."""
        found = self._ledger.all(Kind.EVALUATED)
        return [{"version": metrics["version"], **in_order(metrics)} for metrics in found]

    def close(self) -> None:
        """Ends the reporters and closes the ledger; a checkpoint that is being saved is not recorded."""
        if self._saving is not None and not self._saving.cancel() and not self._saving.cancelled():
            self._saving.exception()  # what ended the run says more
        for reporter in self.reporters or self.watchers:
            reporter.close()
        self._ledger.close()

    def _keep_step(self, version: int, metrics: dict[str, float]) -> None:
        self._ledger.record(Kind.FINISHED, version, **metrics)
        self.version = version
        for reporter in self.reporters:
            reporter.step(version, metrics)
        self._restart_clock()

    def _times(self) -> dict[str, float]:
        step_s = time.perf_counter() - self._step_began
        times = {f"time/{phase.value}_s": seconds for phase, seconds in self._seconds.items() if seconds}
        outside = 1 - sum(self._seconds.values()) / step_s
        return times | {"time/step_s": step_s, "time/outside_share": outside}

    def _restart_clock(self) -> None:
        self._is_recorded = False  # the batch of this step was sampled before a restart
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._step_began = time.perf_counter()

    def _batch_path(self, version: int) -> Path:
        return self.config.run_dir / "batches" / f"step-{version:06d}.parquet"


def _due(version: int, freq: int, num_steps: int) -> bool:
    return freq > 0 and (version % freq == 0 or version == num_steps)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
