"""Saves the checkpoints of a run while it goes on, and deletes old ones."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from services.common.config.run import CheckpointConfig
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.runs.resume import CHECKPOINTS, CRITIC_CHECKPOINTS

_DIRECTORIES = {Kind.SAVED: CHECKPOINTS, Kind.SAVED_CRITIC: CRITIC_CHECKPOINTS}


class SavedModel(Protocol):
    """A model that can write its checkpoint."""

    name: str

    async def save(self, path: str, version: int) -> str:
        """Writes a checkpoint of `version` to `path`; returns the SHA-256 of its manifest."""
        ...


class Checkpoints:
    """Saves one checkpoint at a time, in the background."""

    def __init__(self, run_dir: Path, ledger: Ledger, config: CheckpointConfig, critic_warmup_steps: int = 0):
        self._run_dir, self._ledger, self._config = run_dir, ledger, config
        self._critic_warmup_steps = critic_warmup_steps
        self._saving: asyncio.Task[None] | None = None

    async def begin(self, models: Sequence[SavedModel], version: int) -> None:
        """Starts to save `models`, the policy last, once the checkpoint before is saved.

        Raises:
            LockstepError: As `finish`.
        """
        await self.finish()
        self._saving = asyncio.create_task(self._save(models, version))

    async def finish(self) -> None:
        """Waits for the checkpoint that is being saved, if there is one.

        Raises:
            LockstepError: It could not be saved.
        """
        if self._saving is not None:
            await self._saving
            self._saving = None

    def check(self) -> None:
        """Raises what `finish` would raise, if that is known already. Does not wait."""
        if self._saving is not None and self._saving.done():
            self._saving.result()

    def abandon(self) -> None:
        """Stops waiting for a checkpoint that is being saved; it is not recorded."""
        if self._saving is not None and not self._saving.cancel() and not self._saving.cancelled():
            self._saving.exception()  # the error that ended the run matters more

    async def _save(self, models: Sequence[SavedModel], version: int) -> None:
        for model in models:
            is_critic = model.name == "critic"
            held = version + self._critic_warmup_steps if is_critic else version
            await self._save_one(model, Kind.SAVED_CRITIC if is_critic else Kind.SAVED, version, held)
        # Not before all are saved: a policy's newest checkpoint needs the critic's of the same step.
        await self._delete_all_but(self._config.max_critic_ckpts_to_keep, Kind.SAVED_CRITIC)
        await self._delete_all_but(self._config.max_ckpts_to_keep, Kind.SAVED)

    async def _save_one(self, model: SavedModel, kind: Kind, step: int, held_version: int) -> None:
        path = str((self._run_dir / _DIRECTORIES[kind] / f"step-{step:06d}").absolute())
        recorded = [row["path"] for row in self._ledger.checkpoints(kind)]
        if path in recorded and Path(path).exists():  # a resumed run reaches this step again
            return
        shutil.rmtree(path, ignore_errors=True)  # saved, but the coordinator ended before it was recorded
        digest = await model.save(path, held_version)
        self._ledger.record(kind, step, path=path, manifest_digest=digest)

    async def _delete_all_but(self, num_kept: int, kind: Kind) -> None:
        newest_first = dict.fromkeys(row["path"] for row in reversed(self._ledger.checkpoints(kind)))
        for old in list(newest_first)[num_kept:]:
            self._ledger.record(Kind.DELETED, path=old)
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
