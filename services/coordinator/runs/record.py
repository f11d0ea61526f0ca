"""Records a run in its directory: what its ledger says about batches, evaluations and exports, and their files."""

import hashlib
import logging
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.errors import PreconditionFailed
from services.common.files import replacing, writing
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.runs.reporter import in_order

log = logging.getLogger(__name__)

_BATCH = re.compile(r"step-(\d+)(\.calls)?\.parquet")
_ANSWER = pa.field("answer", pa.string())
_ANSWER_CHARS = 2000
Answers = Mapping[int, str | None]
"""The answer of each prompt group's row in the data, by the group's index."""


@dataclass(frozen=True)
class CollectedBatch:
    """A step's samples with advantages, and the facts about their origin that the ledger keeps."""

    samples: pa.Table
    version: int  # that it updates
    stamp: PolicyStamp  # that the samples were generated from
    decision: Mapping[str, object]  # how the groups were selected, as JSON values
    outcomes: Mapping[str, tuple[int, int]]  # (samples, samples that passed) by prompt id
    dataset: str  # the digest of the training data
    num_prompts: int  # in the training data: together with the seed, it determines their order
    kl: Mapping[str, float] | None  # the KL divergence and its coefficient, if the reward has a KL penalty
    episodes: pa.Table | None = None  # what agents asked and left behind (data.calls.EPISODE_SCHEMA)
    answers: Answers = field(default_factory=dict)


class RunRecord:
    """Writes a run's decisions and samples before they take effect, and reads them back after a restart."""

    def __init__(self, run_dir: Path, ledger: Ledger):
        self.run_dir, self.ledger = run_dir, ledger
        self.batch_is_from_disk = False
        """Whether the current step's batch was sampled before a restart."""
        with writing(run_dir / "batches"):
            (run_dir / "batches").mkdir(exist_ok=True)
            for folder in ("batches", "evaluations"):
                for partial in (run_dir / folder).glob("*.partial"):  # of a coordinator that was killed
                    partial.unlink()

    def next_epoch(self, num_replicas: int) -> int:
        """Returns a weight-group epoch that is higher than all earlier ones."""
        return self.ledger.record(Kind.EPOCH, num_replicas=num_replicas)

    def record_published(self, stamp: PolicyStamp, received: Mapping[str, str], quantized: str = "") -> None:
        """Records that the replicas serve `stamp`, which digest each `received`, by address, and the hash of what all
        of them have `quantized` from these, if they do."""
        own = {"quantized": quantized} if quantized else {}
        self.ledger.record(Kind.PUBLISHED, stamp.version, digest=stamp.digest, received=received, **own)

    def require_same_data(self, dataset_digest: str, others: Mapping[str, str] | None = None) -> None:
        """Checks that the data is the same that the run started with, once it has trained or evaluated on it.

        `others` has the digests of what else must not change, such as the held-out sets, by the name in errors.

        Raises:
            PreconditionFailed: The run was started with other data.
        """
        before: dict[str, str] = {}
        collected = self.ledger.last(Kind.COLLECTED)
        if collected or self.ledger.last(Kind.EVALUATED):
            before = (self.ledger.last(Kind.DATA) or {}).get("digests", {})
        if collected:
            before["data.train"] = collected["dataset"]
        now = {"data.train": dataset_digest, **(others or {})}
        if changed := [name for name, digest in now.items() if before.get(name, digest) != digest]:
            pairs = ", ".join(f"{before[name][:8]} is now {now[name][:8]}" for name in changed)
            raise PreconditionFailed(
                f"{' and '.join(changed)} {'differs' if len(changed) == 1 else 'differ'} from what {self.run_dir} was "
                f"started with (rows, template, tools or tokenizer; digest {pairs}); use the same data, or another name"
            )

    def use_data(self, dataset_digest: str, others: Mapping[str, str]) -> None:
        """Records, before the first step, what `require_same_data` will compare. Raises as it does."""
        self.require_same_data(dataset_digest, others)
        self.ledger.record(Kind.DATA, digests={"data.train": dataset_digest, **others})

    def record_batch(self, batch: CollectedBatch) -> pa.Table:
        """Writes a step's batch to disk and records how it was selected. Returns its samples, for training on them."""
        version, stamp, path = batch.version, batch.stamp, batch_path(self.run_dir, batch.version)
        calls, has_calls = calls_path(self.run_dir, version), batch.episodes is not None
        # The files first: a file without a row is written again after a kill, a row without its file would be damage.
        with writing(path):
            if batch.episodes is not None:
                _write_parquet(batch.episodes, calls)
            _write_parquet(_with_answers(batch.samples, batch.answers), path)
        with self.ledger.transaction():
            self.ledger.record(Kind.SELECTED, version, **batch.decision)
            self.ledger.keep_outcomes(version, batch.outcomes)
            self.ledger.record(
                Kind.COLLECTED,
                version,
                drawn=stamp.version,
                digest=stamp.digest,
                sha256=sha256_of(path),
                calls_sha256=sha256_of(calls) if has_calls else None,
                dataset=batch.dataset,
                num_prompts=batch.num_prompts,
                kl=batch.kl,
            )
        return batch.samples

    def recorded_batch(self, version: int, stamp: PolicyStamp) -> pa.Table | None:
        """Returns the batch that updates `version`, if it was sampled from exactly `stamp` before a restart.

        Returns None if there is none, or its file is missing or damaged.
        """
        recorded, path = self.ledger.last(Kind.COLLECTED, version), batch_path(self.run_dir, version)
        if not recorded or self.recorded_stamp(version) != stamp or not path.is_file():
            return None
        self.batch_is_from_disk = sha256_of(path) == recorded["sha256"]
        return without_answers(pq.read_table(path)) if self.batch_is_from_disk else None

    def recorded_stamp(self, version: int) -> PolicyStamp:
        """Returns the stamp that the newest batch for `version` was sampled from; without a digest if there is none."""
        collected = self.ledger.last(Kind.COLLECTED, version) or {}
        return PolicyStamp(version=collected.get("drawn", version), digest=collected.get("digest", ""))

    def newest_batch(self) -> Path | None:
        collected = self.ledger.last(Kind.COLLECTED)
        return batch_path(self.run_dir, collected["version"]) if collected else None

    def was_evaluated(self, version: int) -> bool:
        return self.ledger.is_newer(Kind.EVALUATED, Kind.FINISHED, version)

    def keep_evaluation(self, name: str, samples: pa.Table, stamp: PolicyStamp, answers: Answers) -> None:
        """Writes the samples of an evaluation of set `name` as Parquet, and records their file's SHA-256."""
        path = evaluation_path(self.run_dir, f"{name}-step-{stamp.version:06d}.parquet")
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            _write_parquet(_with_answers(samples, answers), path)
        self.ledger.record(Kind.EVAL_SAMPLES, stamp.version, file=path.name, sha256=sha256_of(path))

    def evaluations(self) -> list[dict[str, float]]:
        """Returns the metrics of the run's evaluations so far, oldest first, each with its `version`."""
        return [{"version": metrics["version"], **in_order(metrics)} for metrics in self.ledger.evaluations()]

    @property
    def export_path(self) -> Path:
        return (self.run_dir / "model").absolute()

    def is_exported(self, version: int) -> bool:
        """Returns whether `export_path` holds the policy of `version`, of the last time that this step was trained."""
        is_old = self.ledger.is_newer(Kind.FINISHED, Kind.EXPORTED, version)
        return self._exported_version() == version and not is_old and self.export_path.exists()

    def set_aside_export(self, version: int) -> bool:
        """Returns `is_exported`. Renames an export of another version, or of one that was trained again since."""
        path = self.export_path
        if path.exists() and not self.is_exported(version):
            kept = path.with_name(f"{path.name}-{self._exported_version() or 'before'}-{uuid.uuid4().hex[:8]}")
            with writing(path):
                path.rename(kept)
            log.warning("the model that was exported before is kept in %s; delete it if you do not need it", kept)
        return path.exists()

    def _exported_version(self) -> int | None:
        exported = self.ledger.last(Kind.EXPORTED)
        return exported["version"] if exported else None

    def record_export(self, version: int) -> None:
        self.ledger.record(Kind.EXPORTED, version, path=str(self.export_path))


def batch_path(run_dir: Path, version: int) -> Path:
    return run_dir / "batches" / f"step-{version:06d}.parquet"


def calls_path(run_dir: Path, version: int) -> Path:
    return batch_path(run_dir, version).with_suffix(".calls.parquet")


def evaluation_path(run_dir: Path, file: str) -> Path:
    return run_dir / "evaluations" / file


def batches_before(run_dir: Path, version: int) -> list[Path]:
    """Returns the files of batches that update versions below `version`."""
    named = ((path, _BATCH.fullmatch(path.name)) for path in sorted((run_dir / "batches").iterdir()))
    return [path for path, name in named if name and int(name[1]) < version]


def _with_answers(samples: pa.Table, answers: Answers) -> pa.Table:
    """Adds the answer of each sample's row, for people who read the file, if the data has any. Long ones are cut."""
    shown = {group: _cut(answer) for group, answer in answers.items() if answer is not None}
    if not shown:
        return samples
    return samples.append_column(_ANSWER, pa.array(map(shown.get, samples["group"].to_pylist()), _ANSWER.type))


def without_answers(table: pa.Table) -> pa.Table:
    """Returns the samples of a file as services get them. Files of earlier releases have no answers."""
    return table.drop_columns([_ANSWER.name]) if _ANSWER.name in table.column_names else table


def _cut(answer: str) -> str:
    left_out = len(answer) - _ANSWER_CHARS
    return f"{answer[:_ANSWER_CHARS]}\n[… {left_out:,} characters left out …]" if left_out > 0 else answer


def _write_parquet(table: pa.Table, path: Path) -> None:
    """Writes `table` to `path`, where a file is always complete and on disk."""
    # Building dictionaries of lists and bytes would double the time and save nothing.
    scalars = [field.name for field in table.schema if not _is_large(field.type)]
    with replacing(path) as file:
        # The size of a page, which must be below 2 GiB, is looked at only after so many rows, of which one
        # may have 256 MiB (MAX_MESSAGE_BYTES).
        pq.write_table(table, file, compression="zstd", use_dictionary=scalars, write_batch_size=4)


def _is_large(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_binary(kind)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
