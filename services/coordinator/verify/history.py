"""Follows the rows of a run's ledger in order and finds the first that could not have come there."""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import DataLoss
from services.common.json_values import JsonMapping
from services.coordinator.runs.ledger import Kind, place_in
from services.coordinator.runs.reader import LedgerReader, LedgerRow
from services.coordinator.runs.record import batch_path, calls_path, evaluation_path
from services.coordinator.verify.samples import SampleChecks, check_calls, differing

# Sections of the config that decide how weights are cut into buckets, which the digest covers.
_LAYOUT = ("model", "trainer", "weights")


class ViolationError(Exception):
    """A sentence: which rule a row breaks."""


@dataclass
class _Session:
    """The actions of one coordinator since it opened the run."""

    config: JsonMapping
    checkpoint: str
    begun: int | None = None
    version: int = 0
    published: dict[int, str] | None = None
    collected: set[int] | None = None
    regrouped: bool = False
    """Whether the weight group was formed again since the last publication."""


def _read_manifest(checkpoint: Path) -> bytes:
    """Returns the manifest of a checkpoint; empty if there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return (checkpoint / "manifest.json").read_bytes()
    return b""


class History:
    """What may come next after the rows that were given to `follow`."""

    def __init__(self, run_dir: Path, rows: Sequence[LedgerRow], ledger: LedgerReader):
        """Takes all rows that were read from `ledger`, to which the run may append others meanwhile."""
        self._run_dir, self._ledger, self._last_read = run_dir, ledger, rows[-1].seq
        self._newest = {(row.kind, row.version, _name_of(row)): row.seq for row in rows}
        self._unrecorded = _being_written(rows)
        # (seq, version) of the rows that say which batches were deleted, the newest first.
        self._deletions = [
            (row.seq, row.required_version) for row in reversed(rows) if row.kind == Kind.DELETED_BATCHES
        ]
        self.num_deleted = 0
        # A run that goes on deletes checkpoints, so the manifests are read before all that takes long.
        saves = (row for row in rows if row.kind in (Kind.SAVED, Kind.SAVED_CRITIC) and self._is_kept(row))
        self._manifests = {row.seq: _read_manifest(self._current_path(row.body["path"])) for row in saves}
        self._run_id, self._num_rows = "", 0
        self._session = _Session({}, "")
        self._finished = 0  # the newest finished step of the current history
        self._ever_finished: set[int] = set()
        self._published: dict[int, set[tuple[str, str]]] = {}  # version -> layouts and digests
        self._collected: dict[int, JsonMapping] = {}
        self._saved: dict[str, int] = {}
        self._dataset = ""
        self._selected: dict[int, JsonMapping] = {}
        self._evaluations: dict[int, list[tuple[Path, LedgerRow]]] = {}
        self.samples = SampleChecks()
        self._follow: dict[str, Callable[[LedgerRow], None]] = {
            Kind.OPENED: self._opened,
            Kind.BEGUN: self._begun,
            Kind.EPOCH: self._regroups,
            Kind.PUBLISHED: self._is_published,
            Kind.SELECTED: self._is_selected,
            Kind.COLLECTED: self._is_collected,
            Kind.FINISHED: self._is_finished,
            Kind.EVAL_SAMPLES: self._is_sampled_for_evaluation,
            Kind.EVALUATED: self._is_evaluated,
            Kind.SAVED: self._is_saved,
            Kind.SAVED_CRITIC: self._is_saved,
            Kind.DELETED: self._is_deleted,
            Kind.EXPORTED: self._is_exported,
        }

    def follow(self, row: LedgerRow) -> None:
        """Takes the next row.

        Raises:
            ViolationError: It contradicts the rows before it, or a file that it describes.
        """
        self._num_rows += 1
        require(row.seq == self._num_rows, f"row {self._num_rows} is missing: the next one is row {row.seq}")
        require(bool(self._run_id) or row.kind == Kind.OPENED, "the first row does not open the run")
        if row.kind in self._follow:
            self._follow[row.kind](row)

    def _opened(self, row: LedgerRow) -> None:
        run_id = row.body["run_id"]
        require(self._run_id in ("", run_id), f"the run was {self._run_id} before and is now {run_id}")
        self._run_id = run_id
        self._session = _Session(json.loads(row.body["config"]), row.body["checkpoint"])

    def _begun(self, row: LedgerRow) -> None:
        version, checkpoint = row.required_version, self._session.checkpoint
        require(self._session.begun is None, "the session began before")
        saved = self._step_of(checkpoint) if checkpoint else 0
        require(
            version in (self._finished, saved),
            f"the session goes on after step {version}, but the run has finished step {self._finished}, and "
            + (f"the checkpoint that it resumed is of step {saved}" if checkpoint else "it resumed no checkpoint"),
        )
        self._finished = version
        self._session.begun = self._session.version = version
        self._session.published, self._session.collected = {}, set()

    def _regroups(self, row: LedgerRow) -> None:
        self._session.regrouped = True

    def _is_published(self, row: LedgerRow) -> None:
        version, digest = row.required_version, row.body["digest"]
        session, published = self._session, self._in_session(row)
        regrouped, session.regrouped = session.regrouped, False
        # The engines had slept, or the last replica had died and was restarted while it generated.
        if version in published and (session.config.get("placement") == "colocated" or regrouped):
            again = f"version {version} was published again with {digest}, not {published[version]}"
            require(digest == published[version], again)
            return
        require(version not in published, f"version {version} was published twice in one session")
        if published or version == session.version + 1:
            require(version == session.version + 1, f"version {version} was published after version {session.version}")
            require(session.version in self._collected, f"version {version} has no batch that it could come from")
        else:
            # A session's first publication is of the version that it resumed, without a batch of its own before it.
            require(version == session.version, f"version {version} was published, but {session.version} was held")
            self._require_same_weights(version, digest)
        for address, received in row.body.get("received", {}).items():
            require(received == digest, f"replica {address} received weights {received}, but {digest} were sent")
        published[version] = digest
        self._published.setdefault(version, set()).add((self._layout(), digest))

    def _require_same_weights(self, version: int, digest: str) -> None:
        """Checks that a session that goes on after `version` has the weights that this version had."""
        before = {known for layout, known in self._published.get(version, ()) if layout == self._layout()}
        require(
            not before or digest in before,
            f"the session goes on with version {version} of digest {digest}, which was never published before: "
            f"the run had {' and '.join(sorted(before))}",
        )

    def _is_selected(self, row: LedgerRow) -> None:
        self._selected[row.required_version] = row.body

    def _is_collected(self, row: LedgerRow) -> None:
        version, body = row.required_version, row.body
        published, session = self._in_session(row), self._session
        assert session.collected is not None
        drawn, lag = body.get("drawn", version), session.config["trainer"].get("lag", {}).get("versions", 0)
        is_served = drawn == session.version
        require(is_served, f"a batch was sampled from version {drawn} while {session.version} was served")
        # With a lag, the first batches of a session are all sampled from the version that it began with.
        is_first = drawn == session.begun and drawn <= version <= drawn + lag
        require(version == drawn + lag or is_first, f"the batch for version {version} was sampled from version {drawn}")
        require(version not in session.collected, f"two batches for version {version} were sampled in one session")
        require(drawn in published, f"a batch was sampled from version {drawn}, which was not published")
        require(
            body["digest"] == published[drawn],
            f"the batch carries weights {body['digest']} as version {drawn}, but {published[drawn]} were published",
        )
        require(self._dataset in ("", body["dataset"]), "the training data is not that of the batches before")
        self._dataset, self._collected[version] = body["dataset"], body
        session.collected.add(version)
        if self._newest[row.kind, version, None] == row.seq:  # a later batch has replaced the file otherwise
            path = batch_path(self._run_dir, version)
            with self._unless_deleted(path, row):
                self._check_batch(path, row)
            self.num_deleted += not path.is_file()

    def _check_batch(self, path: Path, row: LedgerRow) -> None:
        if self._is_recorded(path, row):
            version, body = row.required_version, row.body
            both = {**self._selected.get(version, {}), **body}
            self._require_none(self.samples.check(path, version, both, self._session.config))
            calls = calls_path(self._run_dir, version)
            if body.get("calls_sha256") and self._is_recorded(calls, row, "calls_sha256"):
                self._require_none(check_calls(path, calls))

    @contextmanager
    def _unless_deleted(self, path: Path, row: LedgerRow) -> Iterator[None]:
        """Checks the file at `path`, which `row` describes, in the block, unless the run has deleted it."""
        try:
            yield
        except (DataLoss, FileNotFoundError, ViolationError):
            if path.is_file():
                raise
            if not self._has_deleted(row):
                self._read_deletions()  # the run may have deleted it meanwhile
            require(self._has_deleted(row), _missing(path, row))

    def _read_deletions(self) -> None:
        """Takes note of what the run has deleted since its rows were read: it records that before it deletes files."""
        for row in self._ledger.rows(after=self._last_read):
            self._last_read = row.seq
            if row.kind == Kind.DELETED_BATCHES:
                self._deletions.insert(0, (row.seq, row.required_version))
            elif row.kind in (Kind.DELETED, Kind.DELETED_EVALUATION):
                self._newest[row.kind, row.version, _name_of(row)] = row.seq

    def _has_deleted(self, row: LedgerRow) -> bool:
        """Returns whether the run has deleted the samples of a row to free space."""
        if row.kind == Kind.EVAL_SAMPLES:
            return self._newest.get((Kind.DELETED_EVALUATION, None, _name_of(row)), 0) > row.seq
        later = itertools.takewhile(lambda deletion: deletion[0] > row.seq, self._deletions)
        return any(row.required_version < first_kept for _, first_kept in later)

    def _is_recorded(self, path: Path, row: LedgerRow, field: str = "sha256") -> bool:
        """Requires that a file is the one whose SHA-256 is the `field` of `row`, the newest of its kind and version.

        Returns False if a coordinator may have been killed after it had replaced the file and before it wrote the row.
        """
        require(path.is_file(), _missing(path, row))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        may_be_new = (row.kind, row.version) in self._unrecorded
        is_same = digest == row.body[field]
        require(is_same or may_be_new, f"{path.name} is not the file that was recorded: its SHA-256 is {digest}")
        return is_same

    def _require_none(self, wrong: Iterable[str]) -> None:
        for sentence in wrong:
            raise ViolationError(sentence)

    def _is_finished(self, row: LedgerRow) -> None:
        version, session, published = row.required_version, self._session, self._in_session(row)
        before = version - 1
        require(version == session.version + 1, f"step {version} was finished after step {session.version}")
        require(before in self._collected, f"step {version} was finished without a batch")
        require(version in published, f"step {version} was finished, but its weights were not published")
        batch = self._collected[before]
        drawn, used = batch.get("drawn", before), batch["digest"]
        # A batch of an earlier session may carry the weights of any publication of its version.
        known = {digest for _, digest in self._published.get(drawn, ())}
        if drawn in published:
            known = {published[drawn]}
        require(used in known, f"step {version} trained on samples of weights {used}, not on those of version {drawn}")
        session.version = self._finished = version
        self._ever_finished.add(version)
        if facts := self.samples.facts.get(before):
            self._require_none(differing(batch_path(self._run_dir, before), facts.metrics, row.body))

    def _is_sampled_for_evaluation(self, row: LedgerRow) -> None:
        path = evaluation_path(self._run_dir, row.body["file"])
        is_newest = self._newest[row.kind, row.version, row.body["file"]] == row.seq
        with self._unless_deleted(path, row):
            if is_newest and self._is_recorded(path, row):
                self._evaluations.setdefault(row.required_version, []).append((path, row))

    def _is_evaluated(self, row: LedgerRow) -> None:
        version = row.required_version
        require(version == self._session.version, f"version {version} was evaluated while another one was served")
        stamp = version, self._in_session(row).get(version, "")
        for path, sampled in self._evaluations.pop(version, []):
            with self._unless_deleted(path, sampled):
                self._require_none(self.samples.check_evaluation(path, stamp, row.body))

    def _is_saved(self, row: LedgerRow) -> None:
        version, path = row.required_version, row.body["path"]
        checkpoint = f"the checkpoint of step {version} was saved"
        require(version in self._ever_finished, f"{checkpoint} before that step was finished")
        require(version <= self._finished, f"{checkpoint} after step {self._finished}")
        self._saved[path] = version
        if row.seq in self._manifests:
            self._check_checkpoint(row, self._manifests[row.seq])

    def _is_kept(self, saved: LedgerRow) -> bool:
        """Returns whether a checkpoint was neither deleted nor saved again since."""
        path = saved.body["path"]
        is_gone = self._newest.get((Kind.DELETED, None, path), 0) > saved.seq
        return not is_gone and self._newest[saved.kind, saved.version, path] == saved.seq

    def _check_checkpoint(self, row: LedgerRow, content: bytes) -> None:
        if not content:
            self._read_deletions()
            if not self._is_kept(row):
                return
        manifest = self._current_path(row.body["path"]) / "manifest.json"
        require(bool(content), f"{manifest} of a recorded checkpoint is missing")
        digest = hashlib.sha256(content).hexdigest()
        is_same = digest == row.body["manifest_digest"]
        require(is_same, f"{manifest} is not the file that was saved: its SHA-256 is {digest}")
        expected = f"{self._run_id}/{row.required_version - 1}"
        batch = json.loads(content).get("state", {}).get("last_batch_id")
        require(batch == expected, f"{manifest} was saved after batch {batch}, not after {expected}")

    def _is_deleted(self, row: LedgerRow) -> None:
        path = row.body["path"]
        require(path in self._saved, f"{path} was deleted, but never saved")

    def _is_exported(self, row: LedgerRow) -> None:
        version = row.required_version
        require(version == self._finished, f"version {version} was exported, but step {self._finished} was the last")

    def _in_session(self, row: LedgerRow) -> dict[int, str]:
        require(self._session.published is not None, f"a row {row.kind} came before its session began")
        assert self._session.published is not None
        return self._session.published

    def _layout(self) -> str:
        return json.dumps([self._session.config.get(section) for section in _LAYOUT], sort_keys=True)

    def _step_of(self, checkpoint: str) -> int:
        """Returns the step of the checkpoint that a session resumed, also if it was deleted since."""
        if checkpoint in self._saved:
            return self._saved[checkpoint]
        if (manifest := self._current_path(checkpoint) / "manifest.json").is_file():
            return int(json.loads(manifest.read_bytes())["state"]["version"])
        named = re.search(r"step-(\d+)$", checkpoint)
        require(named is not None, f"the session resumed {checkpoint}, which is no checkpoint")
        assert named
        return int(named[1])

    def _current_path(self, path: str) -> Path:
        """Returns where a checkpoint is now, also if the run's directory was moved."""
        here = place_in(self._run_dir, path)
        return here if here.is_dir() else Path(path)


def _name_of(row: LedgerRow) -> str | None:
    """Returns the path or file that a row describes."""
    return row.body.get("path", row.body.get("file"))


def _missing(path: Path, row: LedgerRow) -> str:
    return f"{path.name}, of a row {row.kind} of version {row.version}, is missing"


def _being_written(rows: Sequence[LedgerRow]) -> set[tuple[str, int]]:
    """Returns the kinds and versions of rows whose files the last session may have replaced as it ended.

    These are evaluations of the version that it held, and batches that could be collected next.
    """
    begun = next((place for place in reversed(range(len(rows))) if rows[place].kind == Kind.BEGUN), len(rows))
    last = rows[begun:]
    current = [row.required_version for row in last if row.kind in (Kind.BEGUN, Kind.FINISHED)][-1:]
    collected = [row.required_version for row in last if row.kind == Kind.COLLECTED]
    evaluated = [row.required_version for row in last if row.kind == Kind.EVALUATED]
    next_batches = current if not collected else [max(collected) + 1]
    written = {(Kind.EVAL_SAMPLES.value, version) for version in current if version not in evaluated}
    return written | {(Kind.COLLECTED.value, version) for version in next_batches}


def require(is_so: bool, otherwise: str) -> None:
    """Raises ViolationError with the sentence `otherwise`, unless `is_so`."""
    if not is_so:
        raise ViolationError(otherwise)
