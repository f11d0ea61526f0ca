"""Follows the history of a run's calls and finds the first line that could not have come there."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.common.json_values import JsonMapping, JsonObject
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.reader import LedgerRow
from services.coordinator.verify.history import require
from services.coordinator.verify.samples import Facts

Stamp = tuple[int, str]
_POLICY = (0, 1)  # ROLE_UNSPECIFIED means the policy too


@dataclass
class _Call:
    """A call that was sent, and its answers once it has ended."""

    method: str
    peer: str
    sent: JsonObject
    got: Sequence[JsonMapping] = ()

    @property
    def answer(self) -> JsonMapping:
        return self.got[-1] if self.got else {}

    @property
    def header(self) -> JsonMapping:
        return self.sent.get("header", {})

    @property
    def version(self) -> int:
        return self.header["expected_stamp"][0]


@dataclass
class _Session:
    """The state that one coordinator's lines imply so far; if `is_whole` is false, lines were lost."""

    run_id: str
    is_whole: bool
    row: int
    time_s: float = 0.0
    calls: dict[int, _Call] = field(default_factory=dict)
    trainer_versions: set[int] | None = None  # that the trainer may have; None is not known
    served: dict[str, Stamp | None] = field(default_factory=dict)  # by replica
    received: dict[str, Stamp] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)
    plans: dict[int, str] = field(default_factory=dict)
    epoch: int = 0
    sent: Stamp | None = None
    published: Stamp | None = None
    saved: dict[str, str] = field(default_factory=dict)
    episodes: dict[str, tuple[int, Stamp | None]] = field(default_factory=dict)  # last turn, and what was published
    scores: dict[str, list[Sequence[str]]] = field(default_factory=dict)  # by prompt id, hashes of each answer


class CallChecks:
    """What may come next after the lines that were given to `follow`."""

    def __init__(self, rows: Sequence[LedgerRow], facts: Mapping[int, Facts]):
        """Takes all rows of the ledger, and facts of the batches that are on disk, by the version that they update."""
        self._rows, self._facts = {row.seq: row for row in rows}, facts
        self._collected = defaultdict[int | None, list[LedgerRow]](list)  # by version, oldest first
        for row in rows:
            if row.kind == Kind.COLLECTED:
                self._collected[row.version].append(row)
        self._applied: dict[str, str] = {}  # batch id -> hash of its metrics
        self._session = _Session("", is_whole=False, row=0)
        self.num_calls = 0
        self._when_sent: dict[str, Callable[[_Call], None]] = {
            "rollout.OpenRun": self._replica_loses_weights,
            "rollout.CloseRun": self._replica_loses_weights,
            "rollout.Sleep": self._replica_loses_weights,
            "rollout.ReceiveWeights": self._receives,
            "rollout.JoinWeightGroup": self._check_epoch,
            "rollout.CommitWeights": self._commits,
            "rollout.Generate": self._generates,
            "environment.Reset": self._resets,
            "environment.Step": self._steps,
            "trainer.JoinWeightGroup": self._check_epoch,
            "trainer.SendWeights": self._sends,
            "trainer.Train": self._trains,
            "trainer.SaveCheckpoint": self._saves,
        }
        self._when_answered: dict[str, Callable[[_Call], None]] = {
            "rollout.JoinWeightGroup": self._has_joined,
            "rollout.ReceiveWeights": self._has_received,
            "rollout.CommitWeights": self._has_committed,
            "rollout.Generate": self._has_generated,
            "reward.Score": self._has_scored,
            "trainer.OpenRun": self._has_opened,
            "trainer.JoinWeightGroup": self._has_joined,
            "trainer.SendWeights": self._has_sent,
            "trainer.Train": self._has_trained,
            "trainer.SaveCheckpoint": self._has_saved,
        }

    def follow(self, line: JsonMapping) -> None:
        """Takes the next line.

        Raises:
            ViolationError: It contradicts the lines before it, or the ledger.
        """
        if "session" in line:
            self._begin_session(line)
            return
        session = self._session
        if "lost" in line:  # a slow disk dropped lines; from here on only what was seen is compared
            self._session = _Session(session.run_id, is_whole=False, row=session.row)
            return
        require(line["t"] >= session.time_s, "its time is before that of the line before")
        session.time_s = line["t"]
        if "row" in line:
            self._row(line)
        elif "call" in line:
            self.num_calls += 1
            call = session.calls[line["n"]] = _Call(line["call"], line["peer"], {**line["sent"]})
            self._check_sent(call)
        elif line["n"] in session.calls:
            self._goes_on(session.calls[line["n"]], line)
        else:
            require(not session.is_whole, f"call {line['n']} was never sent")

    def _begin_session(self, line: JsonMapping) -> None:
        if line["continues"] and self._session.run_id == line["session"]:
            return
        published = None
        if line["continues"]:  # the files before this one were deleted
            rows = [row for row in self._rows.values() if row.kind == Kind.PUBLISHED and row.seq <= line["rows"]]
            published = _stamp_of(rows[-1]) if rows else None
        self._session = _Session(
            line["session"], is_whole=not line["continues"], row=line["rows"], time_s=line["t"], published=published
        )

    def _goes_on(self, call: _Call, line: JsonMapping) -> None:
        if "end" not in line:
            call.sent |= line["sent"]
            self._check_sent(call)
            return
        call.got = line["got"]
        if line["end"] == "OK" and call.method in self._when_answered:
            self._when_answered[call.method](call)
        del self._session.calls[line["n"]]

    def _check_sent(self, call: _Call) -> None:
        if call.method in self._when_sent:
            self._when_sent[call.method](call)

    def _row(self, line: JsonMapping) -> None:
        session, number = self._session, line["row"]
        row = self._rows.get(number)
        require(row is not None, f"the ledger has lost row {number}")
        assert row
        is_same = (row.kind, row.version) == (line["kind"], line["version"])
        require(is_same, f"row {number} of the ledger is {row.kind} {row.version}")
        is_next = number == session.row + 1
        require(is_next or not session.is_whole, f"row {number} came after row {session.row}")
        session.row = number
        if row.kind == Kind.EPOCH:
            session.epoch = number
        elif row.kind == Kind.PUBLISHED:
            self._is_published(row)
        elif row.kind == Kind.COLLECTED:
            self._is_collected(row)
        elif row.kind == Kind.FINISHED:
            self._require_version(row.required_version, "was finished")
        elif row.kind == Kind.SAVED and row.body["path"] in session.saved:
            digest = session.saved[row.body["path"]]
            require(row.body["manifest_digest"].startswith(digest), f"the trainer saved a manifest of SHA-256 {digest}")

    def _is_published(self, row: LedgerRow) -> None:
        session, stamp = self._session, _stamp_of(row)
        if session.is_whole:
            require(session.sent == stamp, f"{_show(stamp)} was published, but the trainer sent {_show(session.sent)}")
        for replica in row.body.get("received", {}):
            served = session.served.get(replica)
            is_known = session.is_whole or replica in session.served
            require(served == stamp or not is_known, f"{_show(stamp)} was published before {replica} had committed it")
        session.published = stamp

    def _is_collected(self, row: LedgerRow) -> None:
        """Compares the rewards of a batch that is still on disk with the answers of the reward services."""
        session, facts = self._session, self._facts_of(row)
        for prompt, hashes in facts.scores.items() if facts and session.is_whole else ():
            answers = session.scores.get(prompt, [])
            is_known = any([*answer][: len(hashes)] == [*hashes] for answer in answers)
            require(is_known, f"the scores of prompt {prompt} are not those that were answered")

    def _batches(self, version: int) -> Sequence[LedgerRow]:
        """Returns the row of the newest batch for `version` so far; all of them if lines were lost."""
        session = self._session
        rows = self._collected.get(version, [])
        return [row for row in rows if row.seq <= session.row][-1:] if session.is_whole else rows

    def _facts_of(self, row: LedgerRow) -> Facts | None:
        """Returns what is known of the batch of a row; None if a later one has taken its place on disk."""
        newest = self._collected[row.version][-1]
        return self._facts.get(row.required_version) if row.seq == newest.seq else None

    def _has_scored(self, call: _Call) -> None:
        self._session.scores.setdefault(call.sent["prompt_id"], []).append(call.answer["scores"])

    def _replica_loses_weights(self, call: _Call) -> None:
        self._session.served[call.peer] = None
        if call.method != "rollout.Sleep":
            self._session.received.pop(call.peer, None)
            self._session.joined.pop(call.peer, None)

    def _check_epoch(self, call: _Call) -> None:
        session, epoch = self._session, call.sent["group"]["epoch"]
        newest = session.epoch or (epoch if not session.is_whole else 0)
        require(epoch == newest, f"{call.peer} joins epoch {epoch}, but the newest one in the ledger is {newest}")

    def _has_joined(self, call: _Call) -> None:
        session, epoch, plan = self._session, call.sent["group"]["epoch"], call.answer.get("plan_digest", "")
        session.joined[call.peer] = epoch
        session.plans[epoch] = plan if session.plans.setdefault(epoch, plan) == plan else "several"

    def _require_joined(self, call: _Call) -> None:
        session, epoch = self._session, call.sent["epoch"]
        joined = session.joined.get(call.peer, None if session.is_whole else epoch)
        require(joined == epoch, f"{call.peer} was called in epoch {epoch}, but has joined {joined}")
        require(session.plans.get(epoch) != "several", f"the members of epoch {epoch} have built different plans")

    def _receives(self, call: _Call) -> None:
        self._session.served[call.peer] = None
        self._session.received.pop(call.peer, None)
        self._require_joined(call)

    def _has_received(self, call: _Call) -> None:
        self._session.received[call.peer] = call.sent["version"], call.answer["digest"]

    def _sends(self, call: _Call) -> None:
        self._require_joined(call)
        self._require_version(call.sent["version"], "was to be sent")

    def _has_sent(self, call: _Call) -> None:
        self._session.sent = _stamp(call.answer["stamp"])
        version = self._session.sent[0]
        require(version == call.sent["version"], f"version {version} was sent, not {call.sent['version']}")

    def _commits(self, call: _Call) -> None:
        session, stamp = self._session, _stamp(call.sent["stamp"])
        received = session.received.get(call.peer)
        if session.is_whole:
            require(received == stamp, f"{call.peer} was to serve {_show(stamp)}, but received {_show(received)}")
            require(session.sent == stamp, f"{_show(stamp)} was committed, but {_show(session.sent)} was sent")

    def _has_committed(self, call: _Call) -> None:
        self._session.served[call.peer] = _stamp(call.sent["stamp"])

    def _generates(self, call: _Call) -> None:
        session, stamp = self._session, _stamp(call.sent["expected_stamp"])
        served = session.served.get(call.peer)
        is_known = session.is_whole or call.peer in session.served
        require(
            served == stamp or not is_known, f"{call.peer} was asked for {_show(stamp)}, but serves {_show(served)}"
        )
        require(session.published in (stamp, None), f"samples of {_show(stamp)}, which is not the published one")

    def _resets(self, call: _Call) -> None:
        self._session.episodes[call.sent["episode_id"]] = -1, self._session.published

    def _steps(self, call: _Call) -> None:
        """Checks that the turns of an episode come one after the other, all while one version is served."""
        session, episode, turn = self._session, call.sent["episode_id"], call.sent["turn"]
        if episode not in session.episodes:
            require(not session.is_whole, f"turn {turn} of episode {episode}, which never began")
            return
        last, began = session.episodes[episode]
        require(turn in (last, last + 1), f"turn {turn} of episode {episode} came after its turn {last}")
        is_same = began == session.published or not session.is_whole
        require(is_same, f"episode {episode} began with {_show(began)} and went on with {_show(session.published)}")
        session.episodes[episode] = turn, began

    def _has_generated(self, call: _Call) -> None:
        expected = _stamp(call.sent["expected_stamp"])
        for answer in call.got:
            stamp = _stamp(answer["stamp"])
            require(stamp == expected, f"{call.peer} was asked for {_show(expected)} and answered with {_show(stamp)}")

    def _has_opened(self, call: _Call) -> None:
        if call.sent.get("role", 0) in _POLICY:
            self._session.trainer_versions = {call.answer["version"]}

    def _require_version(self, version: int, what: str) -> None:
        versions = self._session.trainer_versions
        require(versions is None or version in versions, f"version {version} {what}, but the trainer holds {versions}")

    def _trains(self, call: _Call) -> None:
        """Checks a part of a request to train: the header, a block or the commit."""
        session, header = self._session, call.header
        if header.get("role", 0) not in _POLICY or "expected_stamp" not in header:
            return
        stamp, batch_id = _stamp(header["expected_stamp"]), header["batch_id"]
        require(batch_id == f"{session.run_id}/{stamp[0]}", f"batch {batch_id} is not that of version {stamp[0]}")
        is_ahead = session.published is None and session.trainer_versions == {stamp[0] + 1}
        is_published = session.published == stamp or is_ahead or not session.is_whole
        require(is_published, f"batch {batch_id} is to update {_show(stamp)}, but {_show(session.published)} is served")
        if "commit" not in call.sent:
            return  # nothing can be applied yet
        drawn = _stamp(header.get("drawn_stamp", header["expected_stamp"]))
        rows = self._batches(stamp[0])
        require(bool(rows), f"batch {batch_id} was sent before it was on disk")
        recorded = [(row.body.get("drawn", stamp[0]), row.body["digest"]) for row in rows]
        on_disk = f"that on disk is of {_show(recorded[-1])}"
        require(drawn in recorded, f"batch {batch_id} is of {_show(drawn)}, but {on_disk}")
        if (versions := session.trainer_versions) is not None:
            is_expected = bool(versions & {stamp[0], stamp[0] + 1})
            require(is_expected, f"batch {batch_id} was sent, but the trainer holds version {versions}")
            session.trainer_versions = versions | {stamp[0] + 1}  # both until the answer says which

    def _has_trained(self, call: _Call) -> None:
        if call.header.get("role", 0) not in _POLICY:
            return
        session, batch_id, version = self._session, call.header["batch_id"], call.version
        now = call.answer["version"]
        require(now == version + 1, f"batch {batch_id} made version {now} of version {version}")
        metrics, applied = call.answer.get("metrics", ""), call.answer.get("samples_sha256", "")
        facts = [self._facts_of(row) for row in self._batches(version)]
        is_recorded = not applied or any(one is None or one.sha256.startswith(applied) for one in facts or [None])
        require(is_recorded, f"the trainer has applied other samples as batch {batch_id} than those that are on disk")
        if call.answer.get("replayed"):
            is_same = metrics == self._applied.get(batch_id, metrics)
            require(is_same, f"batch {batch_id} was answered again, but with other metrics than when it was applied")
        else:
            is_possible = session.trainer_versions is None or version in session.trainer_versions
            require(is_possible, f"batch {batch_id} was applied twice: the trainer held {session.trainer_versions}")
            self._applied[batch_id] = metrics
        session.trainer_versions = {now}

    def _saves(self, call: _Call) -> None:
        if call.sent.get("role", 0) in _POLICY and "version" in call.sent:
            self._require_version(call.sent["version"], "was to be saved")

    def _has_saved(self, call: _Call) -> None:
        self._session.saved[call.sent["path"]] = call.answer["manifest_digest"]


def _stamp(pair: tuple[int, str]) -> Stamp:
    return pair[0], pair[1]


def _stamp_of(row: LedgerRow) -> Stamp:
    return row.required_version, row.body["digest"]


def _show(stamp: Stamp | None) -> str:
    return f"version {stamp[0]} ({stamp[1][:8]})" if stamp else "no version"
