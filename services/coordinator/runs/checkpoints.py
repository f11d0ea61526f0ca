"""Saves a run's checkpoints in the background, deletes old ones and keeps the best: compares evaluations that were
scored alike, and tells whether they have stopped improving.
"""

import asyncio
import hashlib
import itertools
import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from services.common.config.evaluation import BestConfig, EarlyStoppingConfig
from services.common.config.operation import CheckpointConfig
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.files import writing
from services.coordinator.runs.ledger import Decision, Kind, Ledger
from services.coordinator.runs.record import batch_path, batches_before, calls_path, evaluation_path, sha256_of
from services.coordinator.runs.resume import CHECKPOINT_DIRECTORIES

log = logging.getLogger(__name__)

Versions = Mapping[str, str]
"""Name, version and weight of the scorers (`scorer`), name and version of the environment (`environment`) and, of an
evaluation, a JSON object with a digest of each set's `settings`."""


def versions_of(samples: pa.Table) -> dict[str, str]:
    """Returns the versions that scored the samples of a batch or an evaluation; an empty text is none."""
    columns = (samples[name].unique().to_pylist() for name in ("scorer", "environment"))
    scorer, environment = (next(filter(None, values), "") for values in columns)  # a failed episode has no environment
    return {"scorer": scorer, "environment": environment}


def warn_of_other_versions(
    newest_batch: Path | None, scorer: str, environment: str, evaluated: Versions | None = None
) -> None:
    """Logs a line for each scorer, and for the environment, whose version is not that of what the run has scored last:
    the newest batch, whose file is ignored here if it cannot be read, and the newest evaluation, if there are any.
    """
    now, logged = {"scorer": scorer, "environment": environment}, set[tuple[str, str, str]]()
    for source, before in (("batch", _of_batch(newest_batch)), ("evaluation", evaluated)):
        for change in _changes(before or now, now):
            if change not in logged:
                what, old, new = change
                log.warning("%s %s was %s in the newest %s of this run: rewards may differ", what, new, old, source)
            logged.add(change)


def change_since(samples: pa.Table, now: Versions) -> str:
    """Returns what changed since a batch was scored, by scorers or an environment that it has; "" if nothing did."""
    before = {what: old or now[what] for what, old in versions_of(samples).items()}
    return _change(before, now)


def change_between(ledger: Ledger, first: int, last: int) -> str:
    """Returns what changed from the evaluation of version `first` to that of `last`; an empty text if nothing did."""
    return _change(ledger.last(Kind.SCORED, first), ledger.last(Kind.SCORED, last))


def _change(before: Versions | None, now: Versions | None) -> str:
    if before is None or now is None:  # evaluations without scorers, as of SFT
        return ""
    return ", ".join(f"{what} {old} became {new}" for what, old, new in _changes(before, now))


def _of_batch(path: Path | None) -> dict[str, str] | None:
    if path is None:
        return None
    try:
        return versions_of(pq.ParquetFile(path).read_row_group(0, columns=["scorer", "environment"]))
    except (OSError, pa.ArrowException, IndexError):
        return None


def _changes(before: Versions, now: Versions) -> Iterator[tuple[str, str, str]]:
    """Yields what changed, and its old and new version, for each scorer, the environment and each set's settings."""
    sets, sets_now = (json.loads(versions.get("settings", "{}")) for versions in (before, now))
    for name in (name for name in sets if sets_now.get(name, sets[name]) != sets[name]):
        yield f"evaluation.sets.{name}", sets[name], sets_now[name]
    for what in ("scorer", "environment"):
        for old, new in itertools.zip_longest(before[what].split(" + "), now[what].split(" + "), fillvalue=""):
            if old != new:
                yield what, old or "none", new or "none"


def comparable_evaluations(ledger: Ledger, last: int) -> list[Decision]:
    """Returns the evaluation of each version up to `last`, oldest first.

    Only evaluations by the scorers and the environment of the newest one count: those by others cannot be
    compared with it.
    """
    newest = {row["version"]: row for row in ledger.evaluations() if row["version"] <= last}
    scored, versions = {row["version"]: row for row in ledger.all(Kind.SCORED)}, sorted(newest)
    now = scored.get(versions[-1]) if versions else None
    return [newest[version] for version in versions if not _change(scored.get(version), now)]


def require_metric(metrics: Mapping[str, float], config: BestConfig, field: str) -> None:
    """Raises InvalidInput if the metrics of an evaluation do not have the one that the config names."""
    if config.metric not in metrics:
        has = ", ".join(sorted(metrics))
        raise InvalidInput(f"{field}: there is no metric {config.metric}, only {has}", field=field)


def best_of(rows: Sequence[Decision], config: BestConfig, by: float = 0.0) -> Decision | None:
    """Returns the best evaluation, the first if several are equal; None if no value is a number.

    With `by`, a later value counts as better only if the difference is larger.
    """
    best: Decision | None = None
    for row in rows:
        value = row.get(config.metric)
        if value is None or value != value:  # NaN
            continue
        if best is None or config.is_better(value, best[config.metric], by):
            best = row
    return best


def best_if_stalled(rows: Sequence[Decision], config: EarlyStoppingConfig) -> Decision | None:
    """Returns the best evaluation if the last `patience` ones have brought no better value, else None."""
    best = best_of(rows, config, config.min_delta)
    return best if best and len(rows) - 1 - rows.index(best) >= config.patience else None


MANIFEST = "manifest.json"


class SavedModel(Protocol):
    """A model that can write its checkpoint."""

    name: str

    async def save(self, path: str, version: int) -> str:
        """Writes a checkpoint of `version` to `path`; returns the SHA-256 of its manifest."""
        ...


def require_visible(written: Path, what: str, digest: str = "") -> None:
    """Checks that what the trainer has written on its host is at the same path here, as a file with this SHA-256 if
    `digest` is not empty. The message names it as `what`.

    Raises:
        PreconditionFailed: STORAGE_FAILED, the two hosts have different file systems there.
    """
    here = written.resolve()
    with suppress(OSError):  # NFS remembers that a name was absent; listing the directory asks the server again
        os.listdir(written.parent)
    try:
        is_it = sha256_of(written) == digest if digest else written.exists()
        why = "is another one" if digest else "is missing"
    except OSError as error:
        is_it, why = False, f"cannot be read: {error.strerror}"
    if not is_it:
        raise PreconditionFailed(
            f"{what} is at {written} on the trainer's host, but on this host ({socket.gethostname()}) {here} {why}; "
            "set runs_dir (of a coordinator daemon: --runs-dir) to a file system that both have at the same path, then "
            "run the same command again",
            reason=Reason.STORAGE_FAILED,
            field="runs_dir",
            written=str(written),
            path=str(here),
        )


class Checkpoints:
    """Saves one checkpoint at a time, in the background."""

    def __init__(self, run_dir: Path, ledger: Ledger, config: CheckpointConfig, critic_warmup_steps: int = 0):
        self._run_dir, self._ledger, self._config = run_dir, ledger, config
        self._critic_warmup_steps = critic_warmup_steps
        self._saving: asyncio.Task[None] | None = None

    async def begin(self, models: Sequence[SavedModel], version: int) -> None:
        """Waits until the previous checkpoint is saved, then starts to save `models`; the policy must be the last."""
        await self.finish()
        self._saving = asyncio.create_task(self._save(models, version))

    async def finish(self) -> None:
        if self._saving is not None:
            await self._saving
            self._saving = None

    def check(self) -> None:
        """Raises the error of a save that has failed. Does not wait for one in progress."""
        if self._saving is not None and self._saving.done():
            self._saving.result()

    def abandon(self) -> None:
        """Cancels waiting for the save in progress, whose checkpoint is not recorded. Logs why it failed, if it did."""
        if self._saving is None or self._saving.cancel() or self._saving.cancelled():
            return
        if error := self._saving.exception():  # not raised: another error has ended the run, and may follow from it
            log.warning("the last checkpoint was not saved: %s", error)

    def adopt(self, version: int, batch_id: str) -> None:
        """Records the policy's checkpoint of `version` if a coordinator ended while the trainer completed it.

        The trainer must have trained from `version` since, so that it cannot be saved again. `batch_id` is that of the
        last batch before it.
        """
        manifest = Path(self._path(Kind.SAVED, version)) / MANIFEST
        if self._ledger.is_newer(Kind.SAVED, Kind.FINISHED, version) or not manifest.is_file():
            return
        content = manifest.read_bytes()
        if json.loads(content)["state"]["last_batch_id"] == batch_id:
            digest = hashlib.sha256(content).hexdigest()
            self._ledger.record(Kind.SAVED, version, path=str(manifest.parent), manifest_digest=digest)

    def leave_later(self, step: int) -> None:
        """Renames checkpoints of steps after `step` and records them as deleted, because the run leaves that branch.

        The critic's of a step whose policy was not saved keeps its name: nothing can go back to it, and the next of
        this step replaces it.
        """
        policy, critic = (self._ledger.checkpoints(kind) for kind in (Kind.SAVED, Kind.SAVED_CRITIC))
        saved = {row["version"] for row in policy}
        left = f"left-{uuid.uuid4().hex[:8]}"  # the same for the critic's, so that a run can go back to both
        for row in (row for row in (*policy, *critic) if row["version"] > step):
            self._ledger.record(Kind.DELETED, path=row["path"])
            if (place := Path(self._ledger.place(row))).is_dir() and row["version"] in saved:
                place.rename(place.with_name(f"{left}-{place.name}"))

    def best(self) -> Decision | None:
        """Returns the evaluation of the saved step with the best value of `keep_best`; None if there is none."""
        saved = {row["version"] for row in self._ledger.checkpoints(Kind.SAVED)}
        if self._config.keep_best is None or not saved:
            return None
        rows = [row for row in comparable_evaluations(self._ledger, max(saved)) if row["version"] in saved]
        return best_of(rows, self._config.keep_best)

    def _path(self, kind: Kind, step: int) -> str:
        return str((self._run_dir / CHECKPOINT_DIRECTORIES[kind] / f"step-{step:06d}").absolute())

    async def _save(self, models: Sequence[SavedModel], version: int) -> None:
        for model in models:
            if model.name == "critic":  # it has trained on the batches of its warm-up before
                await self._save_one(model, Kind.SAVED_CRITIC, version, version + self._critic_warmup_steps)
            else:
                await self._save_one(model, Kind.SAVED, version, version)
        # Only once all are saved: the policy's newest checkpoint needs the critic's of the same step.
        await self._delete_all_but(self._config.max_critic_ckpts_to_keep, Kind.SAVED_CRITIC)
        await self._delete_all_but(self._config.max_ckpts_to_keep, Kind.SAVED)
        await self._delete_batches()
        await self._delete_evaluations()

    async def _save_one(self, model: SavedModel, kind: Kind, step: int, model_version: int) -> None:
        path = self._path(kind, step)
        recorded = map(self._ledger.place, self._ledger.checkpoints(kind))
        if path in recorded and Path(path).exists():  # a resumed run has reached this step again
            return
        shutil.rmtree(path, ignore_errors=True)  # left by a coordinator that ended before recording it
        digest = await model.save(path, model_version)
        what = f"the checkpoint of the {model.name} after step {step}"
        await asyncio.to_thread(require_visible, Path(path, MANIFEST), what, digest)
        await self._ledger.free()
        self._ledger.record(kind, step, path=path, manifest_digest=digest)

    async def _delete_all_but(self, num_kept: int, kind: Kind) -> None:
        saved = self._ledger.checkpoints(kind)
        newest_first = list(dict.fromkeys(map(self._ledger.place, reversed(saved))))
        best = self.best()
        best_path = self._path(kind, best["version"]) if best else ""
        for old in [place for place in newest_first[num_kept:] if place != best_path]:
            await self._ledger.free()
            for path in dict.fromkeys(row["path"] for row in saved if self._ledger.place(row) == old):
                self._ledger.record(Kind.DELETED, path=path)
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
            if Path(old).exists():
                log.warning("%s is no longer a checkpoint of the run, and cannot be deleted: delete it by hand", old)

    async def _delete_batches(self) -> None:
        newest, saved = self._ledger.last(Kind.COLLECTED), self._ledger.checkpoints(Kind.SAVED)
        if self._config.max_batches_to_keep is None or newest is None:
            return
        oldest_saved = sorted({row["version"] for row in saved})[-self._config.max_ckpts_to_keep :][0]
        first_kept = min(oldest_saved, newest["version"] - self._config.max_batches_to_keep + 1)
        best = self.best()
        needed = {*self._sampled_before(best["version"])} if best else set[Path]()
        if old := [path for path in batches_before(self._run_dir, first_kept) if path not in needed]:
            await self._ledger.free()
            self._ledger.record(Kind.DELETED_BATCHES, first_kept)
            await asyncio.to_thread(_delete, old[::-1])  # a batch before its calls, which `verify` would miss

    async def _delete_evaluations(self) -> None:
        if self._config.max_evaluations_to_keep is None:
            return
        newest_first = {row["file"]: row["version"] for row in reversed(self._ledger.all(Kind.EVAL_SAMPLES))}
        finished = self._ledger.last_finished() or 0  # of later steps are those that the run has left
        kept = sorted(dict.fromkeys(newest_first.values()), key=lambda version: version > finished)
        kept = kept[: self._config.max_evaluations_to_keep]
        files = (path for path in sorted(evaluation_path(self._run_dir, "").glob("*")) if path.name in newest_first)
        if old := [path for path in files if newest_first[path.name] not in kept]:
            await self._ledger.free()
            for path in old:
                self._ledger.record(Kind.DELETED_EVALUATION, file=path.name)
            await asyncio.to_thread(_delete, old)

    def _sampled_before(self, version: int) -> Iterator[Path]:
        """Yields the files of the batches that update `version` and later ones, but were sampled before it.

        With a lag, a run that goes back to this checkpoint trains on them, and cannot sample them again.
        """
        for later in itertools.count(version):
            collected = self._ledger.last(Kind.COLLECTED, later)
            if collected is None or collected.get("drawn", later) >= version:
                return
            yield batch_path(self._run_dir, later)
            yield calls_path(self._run_dir, later)


def _delete(files: Sequence[Path]) -> None:
    for path in files:
        with writing(path):
            path.unlink(missing_ok=True)
