"""Reads a run's recorded steps for replay. Step n makes version n of the weights from version n - 1."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from services.common.config.load import parse_json
from services.common.config.run import Config
from services.common.errors import DataLoss, InvalidInput, NotFound, PreconditionFailed
from services.common.json_values import JsonMapping
from services.coordinator.runs.ledger import Decision, Kind
from services.coordinator.runs.reader import LedgerReader
from services.coordinator.runs.record import batch_path, calls_path, sha256_of, without_answers
from services.coordinator.runs.resume import differences, require_saved


@dataclass(frozen=True)
class Difference:
    what: str
    recorded: str
    now: str


@dataclass(frozen=True)
class Batch:
    """The samples of a step; `differences` is not empty if the file is not the one that was recorded."""

    samples: pa.Table
    dataset_digest: str
    differences: tuple[Difference, ...]


class Record:
    """Reads the files of a run. Must be closed.

    Raises:
        NotFound: `run_dir` holds no run.
        PreconditionFailed: It is an SFT run, or its config was changed since.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._ledger = LedgerReader(run_dir)
        try:
            self._opened = self._ledger.all(Kind.OPENED)
            self.config = self._read_config()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._ledger.close()

    def config_of(self, step: int) -> Config:
        """Returns the config of the session that finished `step`; a resume may have had another.

        Replay trains all steps since the last checkpoint with it, also those of an earlier session.
        """
        return parse_json(Config, self._ledger.opening_of(step)["config"])

    def require_step(self, step: int) -> None:
        """Raises InvalidInput if `step` is below 1, NotFound if the run has not finished it."""
        if step < 1:
            raise InvalidInput(f"--step {step}: steps are counted from 1", field="step")
        finished = [row["version"] for row in self._ledger.all(Kind.FINISHED)]
        if step not in finished:
            has = f"has steps {min(finished)} to {max(finished)}" if finished else "has not finished a step"
            raise NotFound(f"--step {step}: {self.run_dir} {has}", field="step")

    def batch(self, step: int) -> Batch:
        samples, collected, differs = self._read(step, batch_path(self.run_dir, step - 1), "samples", "sha256")
        return Batch(without_answers(samples), collected["dataset"], differs)

    def episodes(self, step: int) -> tuple[list[JsonMapping], tuple[Difference, ...]]:
        """Returns what the agents of a step asked and left behind (rows of data.calls.EPISODE_SCHEMA), and the
        differences if the file is not the one that was recorded.
        """
        table, _, differs = self._read(step, calls_path(self.run_dir, step - 1), "calls of agents", "calls_sha256")
        return table.to_pylist(), differs

    def require_batch(self, step: int) -> None:
        """Raises NotFound if the samples of `step` were not kept."""
        self._collected(step, batch_path(self.run_dir, step - 1), "samples", "sha256")

    def _collected(self, step: int, path: Path, what: str, field: str) -> Decision:
        """Returns the row of the ledger that has the SHA-256 of a step's file in `field`."""
        collected = self._ledger.last(Kind.COLLECTED, step - 1)
        if collected is None or collected.get(field) is None or not path.is_file():
            raise NotFound(f"the {what} of step {step} were not kept: there is no {path}", field="step")
        return collected

    def _read(self, step: int, path: Path, what: str, field: str) -> tuple[pa.Table, Decision, tuple[Difference, ...]]:
        """Returns a file of a step and the row of the ledger that has its SHA-256 in `field`."""
        collected = self._collected(step, path, what, field)
        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise DataLoss(f"{path} cannot be read: {error}") from error
        name = f"SHA-256 of {path.name}"
        return table, collected, tuple(compare({name: collected[field]}, {name: sha256_of(path)}))

    def metrics(self, step: int) -> dict[str, float]:
        return self._ledger.last(Kind.FINISHED, step) or {}

    def digest(self, version: int) -> str:
        """Returns the digest of the weights that were published as `version`; empty if they were not published."""
        return (self._ledger.last(Kind.PUBLISHED, version) or {}).get("digest", "")

    def start(self, version: int) -> tuple[int, str]:
        """Returns (version, checkpoint) of the newest weights at or before `version` that still exist.

        An empty checkpoint stands for the model that the run started with.

        Raises:
            NotFound: No such weights exist.
            DataLoss: The checkpoint is not the one that was saved.
        """
        if saved := self._newest(Kind.SAVED, version):
            return saved
        first, began = self._ledger.first_opening()["checkpoint"], self._ledger.all(Kind.PUBLISHED)[0]["version"]
        if began > version or (first and not (Path(first) / "manifest.json").is_file()):
            raise NotFound(
                f"no checkpoint at or before step {version} is left: the run started at step {began}"
                + (f" with {first}" if first else ""),
                field="step",
            )
        return began, first

    def critic_start(self, version: int) -> tuple[int, str] | None:
        """Like `start`, for the critic; None if no such weights exist.

        A critic with warm-up can only start from a checkpoint, because the batches of its warm-up are not kept.
        """
        if saved := self._newest(Kind.SAVED_CRITIC, version):
            return saved
        is_fresh = self.config.critic and not self.config.critic.warmup_steps
        return (0, "") if is_fresh and self.start(version) == (0, "") else None

    def critic_checkpoint(self, step: int) -> Path | None:
        """Returns the critic's checkpoint of `step`, if it still exists."""
        saved = self._newest(Kind.SAVED_CRITIC, step)
        return Path(saved[1]) if saved and saved[0] == step else None

    def _newest(self, kind: Kind, version: int) -> tuple[int, str] | None:
        # Of saves at one path, the last counts: a run that went back has replaced the checkpoint.
        saved = {self._ledger.place(row): row for row in self._ledger.checkpoints(kind) if row["version"] <= version}
        for place, row in sorted(saved.items(), key=lambda item: -item[1]["version"]):
            if (manifest := Path(place, "manifest.json")).is_file():
                require_saved(manifest, row["manifest_digest"])
                return row["version"], place
        return None

    def _read_config(self) -> Config:
        if not self._opened:
            raise DataLoss(f"{self.run_dir}: the ledger is empty; the run was never opened")
        # A session that had nothing to do, or did not begin, has recorded its config and not written it.
        text = (self._ledger.opening_that_began() or self._opened[0])["config"]
        recorded, path = json.loads(text), self.run_dir / "config.json"
        if "rollout" not in recorded:
            raise PreconditionFailed(f"{self.run_dir} is an SFT run, which keeps no samples to replay")
        try:
            now = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise DataLoss(f"{path} cannot be read: {error}") from error
        if changed := list(differences(now, recorded)):
            raise PreconditionFailed(
                f"{path} was changed since the run: {', '.join(changed)}; restore it to replay the run"
            )
        return parse_json(Config, text)


def compare(recorded: Mapping[str, object], now: Mapping[str, object], where: str = "") -> Iterator[Difference]:
    """Yields a difference, named after `where`, for every value of `now` that is not exactly the recorded one."""
    for name, value in now.items():
        if name not in recorded:
            yield Difference(where + name, "nothing", _value_text(value))
        elif recorded[name] != value:
            yield Difference(where + name, _value_text(recorded[name]), _value_text(value))


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)  # a number with all its digits
