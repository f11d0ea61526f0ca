"""One episode: a run, a fault at one of its events, the sessions that it takes to its end, and what must hold then."""

import asyncio
import contextlib
import datetime
import fcntl
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.coordinator.verify.session import verify
from tests.campaign.cluster import Cluster, Process
from tests.campaign.faults.all import FAULTS
from tests.campaign.faults.base import Scene, Undo
from tests.campaign.faults.disks import restore
from tests.campaign.workspace import LEASE_S, NUM_STEPS, REAL_IS_SLOWER, write_config
from tests.e2e.lockstep_command import numbers
from tests.small_disk import NUM_BYTES

# A session that lasts longer hangs: one takes seconds, and no fault lasts for more than a few deadlines.
_HANG_S = 150.0
_MAX_SESSIONS = 6
# The checkpoints of a real run.
_REAL_DISK = 512 << 20
_REASON = re.compile(r"^lockstep: error: ([A-Z_]+): ", re.MULTILINE)
_NOT_WRITTEN = r"{}/?(\S*) (?:cannot be (?:written|made)|gets no more lines|misses lines)"
_WARNING = re.compile(r"^(\S+ \S+) [WE] ")
# Untyped, or a bug by its own word.
_BAD_REASONS = {"INTERNAL"}
# Counts of episodes that failed with their environment, and were played again.
_COSTS = "environment/failed_"
# The kind of run that a victim belongs to; others are in all kinds.
_VARIANTS = {"worker": "episodes", "environment": "episodes", "pair-0": "colocated", "pair-1": "colocated"}
# A rival's log is not read, and a disk that fails loses what was not synced.
_UNSAID = ("two-coordinators", "another-run", "read-only-disk")


@dataclass(frozen=True)
class Plan:
    """What an episode does; it follows from the campaign's seed and the episode's number alone."""

    variant: str
    fault: str
    victim: str
    event: str
    nth: int


@dataclass(frozen=True)
class Baseline:
    """What a run that nothing disturbs leaves behind, and what happens in it."""

    weights: bytes
    numbers: list[dict[str, float]]
    events: Mapping[str, int]
    seconds: float


@dataclass
class Result:
    """How an episode went."""

    episode: int
    plan: Plan
    injected: bool = False
    outcomes: list[str] = field(default_factory=list)
    """How each session ended: `done`, `killed`, or the reason of its error."""
    detection_s: float | None = None
    recovery_s: float | None = None
    wall_s: float = 0.0
    violations: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """What could not be written, by the logs: paths in the run's directory, with N for digits."""

    def row(self) -> dict[str, Any]:
        row = asdict(self) | asdict(self.plan)
        del row["plan"]
        return row


def make_plan(seed: int, episode: int, faults: list[str], baselines: Mapping[str, Baseline]) -> Plan:
    """Chooses process, phase and fault."""
    number = random.Random(f"{seed} {episode}")
    fault = FAULTS[number.choice(faults)]
    victim = number.choice(fault.victims)
    variant = _VARIANTS.get(victim, "")
    variant = variant if variant in baselines else number.choice([*baselines])
    event = number.choice(sorted(baselines[variant].events))
    return Plan(variant, fault.name, victim, event, number.randrange(baselines[variant].events[event]))


class Episode:
    """Runs one plan."""

    def __init__(self, cluster: Cluster, directory: Path, files: Path, result: Result):
        self._cluster, self._directory, self._files, self._result = cluster, directory, files, result
        self._plan = result.plan
        self._seen: Counter[str] = Counter()
        self._scene: Scene | None = None
        self._injected_at: float | None = None
        self._injected_time: float | None = None
        self._undoing: list[asyncio.Task[None]] = []
        self._disk: Any = None

    async def run(self, baseline: Baseline) -> None:
        """Runs the sessions and checks what is left."""
        begin = time.monotonic()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()
        is_real = self._cluster.is_real
        write_config(self._directory, self._files, self._plan.variant, is_real=is_real)
        with ExitStack() as stack:
            if mount := FAULTS[self._plan.fault].disk:
                self._disk = stack.enter_context(mount(self._directory / "runs", _REAL_DISK if is_real else NUM_BYTES))
            await self._sessions()
            await self._mend()
            self._result.refused = self._refused()
            if not self._result.violations:
                self._result.violations += await self._left_open() + self._wrong(baseline)
        self._result.wall_s = round(time.monotonic() - begin, 3)

    async def _sessions(self) -> None:
        result, notes = self._result, {}
        for number in range(_MAX_SESSIONS):
            await self._cluster.until_ready()
            outcome = await self._session(with_fault=number == 0)
            result.outcomes.append(outcome)
            notes = self._scene.notes if self._scene else notes
            if isinstance(rival := notes.pop("rival", None), Process):
                self._check_rival(rival, await self._end_of(rival))
            if outcome == "done":
                return
            if outcome in ("hang", "untyped", *_BAD_REASONS):
                result.violations.append(f"session {number + 1}: {outcome}: {self._tail()}")
                return
            if number:  # it was resumed and has refused a damaged file, or met the disk again
                restore(notes)
                await self._mend()
        result.violations.append(f"not done after {_MAX_SESSIONS} sessions: {result.outcomes}: {self._tail()}")

    async def _session(self, *, with_fault: bool) -> str:
        """Runs a coordinator to its end; returns how it ended."""
        cluster = self._cluster
        coordinator = await self._start("run", cluster.gate)
        run_dir = self._directory / "runs" / "run"
        self._scene = (
            Scene(cluster, coordinator, run_dir, random.Random(self._plan.event), self._start, disk=self._disk)
            if with_fault
            else self._scene
        )
        cluster.on_event = self._at_gate
        code = await self._end_of(coordinator)
        if code != 0:
            self._detected(time.time())
        elif said := self._first_warning():
            self._detected(said)
        for task in self._undoing:
            task.cancel()
        await asyncio.gather(*self._undoing, return_exceptions=True)
        await self._undo_all()
        cluster.on_event = None
        if code is None:
            return "hang"
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return "killed"
        reasons = _REASON.findall(coordinator.log.read_text(errors="replace"))
        return "done" if code == 0 else reasons[-1] if reasons and code == 2 else "untyped"

    async def _start(self, name: str, gate: Path | None = None) -> Process:
        """Starts a coordinator."""
        log = self._directory / f"{name}-{time.monotonic_ns()}.out"
        at = self._cluster.addresses
        services = [f"--trainer={at['trainer']}", f"--reward={at['reward']}"]
        services += [f"--rollout={at['rollout-0']}", f"--rollout={at['rollout-1']}"]
        args = [str(self._directory / "run.yaml"), f"name={name}", *services]
        return await self._cluster.zygote.fork("coordinator", args, log, gate, self._cluster.directory)

    async def _at_gate(self, event: str) -> str:
        plan, scene = self._plan, self._scene
        number = self._seen[event]
        self._seen[event] += 1
        if self._injected_at is not None and event == "coordinator.finished.end":
            self._recovered()
        if scene is None or self._injected_at is not None or (event, number) != (plan.event, plan.nth):
            return "go"
        self._injected_at, self._injected_time = time.monotonic(), time.time()
        await FAULTS[plan.fault].inject(scene, plan.victim)
        self._result.injected = "impossible" not in scene.notes
        for after_s, undo in scene.undos:
            self._undoing.append(asyncio.create_task(self._later(after_s, undo)))
        return scene.answer

    async def _later(self, after_s: float, undo: Undo) -> None:
        await asyncio.sleep(after_s)
        assert self._scene
        self._scene.undos = [one for one in self._scene.undos if one[1] is not undo]
        await _done(undo)

    async def _undo_all(self) -> None:
        if self._scene:
            undos, self._scene.undos = self._scene.undos, []
            for _, undo in undos:
                await _done(undo)

    async def _mend(self) -> None:
        """Ends what lasts longer than the session in which it began."""
        if self._scene and "mend" in self._scene.notes:
            await _done(self._scene.notes.pop("mend"))

    async def _end_of(self, coordinator: Process) -> int | None:
        """Waits for the end of a process; None if it hangs and was killed."""
        try:
            async with asyncio.timeout(_HANG_S * self._slower):
                await coordinator.ended.wait()
            return coordinator.code
        except TimeoutError:
            coordinator.signal(signal.SIGKILL)
            await coordinator.ended.wait()
            return None

    @property
    def _slower(self) -> float:
        return REAL_IS_SLOWER if self._cluster.is_real else 1.0

    def _first_warning(self) -> float | None:
        """Returns when the coordinator's log first warned after the injection; None if it never did."""
        path, since = self._directory / "runs" / "run" / "logs" / "coordinator.log", self._injected_time
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            if (found := _WARNING.match(line)) and since:
                at = datetime.datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                if at >= since - 0.001:
                    return at
        return None

    def _detected(self, at: float) -> None:
        is_known = not self._plan.fault.startswith("clock")  # a log whose clock jumps does not say when
        if is_known and self._injected_time is not None and self._result.detection_s is None:
            self._result.detection_s = round(max(0.0, at - self._injected_time), 3)

    def _recovered(self) -> None:
        if self._result.recovery_s is None and self._injected_at is not None:
            self._result.recovery_s = round(time.monotonic() - self._injected_at, 3)

    def _check_rival(self, rival: Process, code: int | None) -> None:
        said = rival.log.read_text(errors="replace")
        is_refused = code == 2 and "is open in another coordinator" in said
        if self._plan.fault == "two-coordinators" and not is_refused and code != 0:
            self._result.violations.append(f"the second coordinator ended with {code}: {said[-500:]}")
        if self._plan.fault == "another-run" and code not in (0, 2):
            self._result.violations.append(f"the other run ended with {code}: {said[-500:]}")

    def _tail(self) -> str:
        files = sorted(self._directory.glob("run-*.out"))
        return files[-1].read_text(errors="replace")[-1500:] if files else ""

    def _refused(self) -> list[str]:
        """Returns what sessions said that they could not write."""
        logs = [*self._directory.glob("*.out"), self._directory / "runs" / "run" / "logs" / "coordinator.log"]
        text = "\n".join(log.read_text(errors="replace") for log in logs if log.exists())
        found = re.findall(_NOT_WRITTEN.format(re.escape(str(self._directory / "runs" / "run"))), text)
        return sorted({re.sub(r"\d+", "N", path) for path in found})

    def _wrong(self, baseline: Baseline) -> list[str]:
        """Returns a sentence for everything that is not as after an undisturbed run."""
        run_dir, wrong = self._directory / "runs" / "run", []
        verdict = verify(run_dir)
        if damaged := self._still_damaged():
            if damaged not in verdict.violation:
                wrong.append(f"lockstep verify does not notice that {damaged} is damaged")
            restore(self._scene.notes if self._scene else {})
            verdict = verify(run_dir)
        if verdict.violation:
            wrong.append("\n".join((f"lockstep verify: {verdict.violation}", *verdict.lines)))
        finished = [row.version for row in verdict.rows if row.kind == "finished"]
        if sorted(set(finished)) != [*range(1, NUM_STEPS + 1)]:
            wrong.append(f"finished steps: {finished}")
        if exported(run_dir) != baseline.weights:
            wrong.append("the weights are not those of the undisturbed run")
        if not _has_all_lines(self._directory, baseline, is_full=self._disk is not None):
            wrong.append("metrics.jsonl is not that of the undisturbed run")
        wrong += [f"left behind: {path}" for path in run_dir.rglob("*.partial")]
        wrong += [f"left behind: {command}" for command in self._cluster.engines()]
        with (run_dir / "ledger.lock").open() as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return wrong
        return [*wrong, "the ledger is still locked"]

    async def _left_open(self) -> list[str]:
        """Returns what a finished run has left open on services.

        It is nothing; but a run that could not reach a service has said so, and is closed there when its lease ends, as
        is another run that failed.
        """
        log = self._directory / "runs" / "run" / "logs" / "coordinator.log"
        said = log.read_text(errors="replace") if log.exists() else ""
        has_lease = "may still be open at" in said or self._plan.fault in _UNSAID
        deadline = time.monotonic() + ((LEASE_S + _HANG_S) * self._slower if has_lease else 0.0)
        await self._cluster.until_ready()
        while (held := await self._cluster.open_runs()) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return held

    def _still_damaged(self) -> str:
        """Returns the name of a damaged file that no session has read or written again; "" if there is none."""
        path, content = (self._scene.notes if self._scene else {}).get("restore", (Path(), b""))
        return path.name if path.is_file() and path.read_bytes() != content and path.suffix == ".parquet" else ""


async def _done(undo: Undo) -> None:
    if waiting := undo():
        await waiting


def exported(run_dir: Path) -> bytes:
    """Returns the weights that a run has exported."""
    return b"".join(
        path.read_bytes()
        for path in sorted((run_dir / "model").glob("*"))
        if "weights" in path.name or path.suffix == ".safetensors"
    )


def _has_all_lines(directory: Path, baseline: Baseline, *, is_full: bool) -> bool:
    """Compares metrics.jsonl without counts of what a fault has cost. A full disk may cost lines, and ends no run."""
    lines = numbers(directory)
    found = [{name: value for name, value in line.items() if not name.startswith(_COSTS)} for line in lines]
    return all(line in baseline.numbers for line in found) if is_full else found == baseline.numbers


async def baseline_of(cluster: Cluster, directory: Path, files: Path, variant: str) -> Baseline:
    """Runs a variant undisturbed."""
    result = Result(-1, Plan(variant, "kill", "coordinator", "", 0))
    episode = Episode(cluster, directory, files, result)
    directory.mkdir()
    write_config(directory, files, variant, is_real=cluster.is_real)
    begin = time.monotonic()
    async with AsyncExitStack():
        await cluster.until_ready()
        outcome = await episode._session(with_fault=True)
    assert outcome == "done", f"{variant}: {outcome}: {episode._tail()}"
    run_dir = directory / "runs" / "run"
    # GetInfo renews leases, when time says so. A seed must draw the same events on a slow machine.
    events = {event: number for event, number in episode._seen.items() if ".GetInfo." not in event}
    return Baseline(exported(run_dir), numbers(directory), events, time.monotonic() - begin)
