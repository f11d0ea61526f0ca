"""Tests a ledger that another process holds, that is damaged in any byte, or that is on a shared file system."""

import asyncio
import contextlib
import logging
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.errors import DataLoss, InternalError, LockstepError, Reason, Unavailable
from services.coordinator.runs import database, ledger, reader
from services.coordinator.runs.database import Database, has_local_locks, is_shared
from services.coordinator.runs.ledger import LEDGER, Kind, Ledger
from services.coordinator.runs.reader import LedgerReader
from services.coordinator.runs.resume import open_run
from services.coordinator.runs.run import Run
from tests.coordinator.fake_services import make_config
from tests.coordinator.runs.killing import make_run, surviving_services
from tests.support import PATIENCE_S

_HOLDER = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
database.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that keeps a write lock on a database until it is told to let go."""

    def __init__(self, path: Path):
        command = [sys.executable, "-c", _HOLDER, str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout and self._process.stdout.readline() == b"held\n"
        self.pid = self._process.pid

    def let_go(self) -> None:
        self._process.communicate(timeout=PATIENCE_S)


@contextlib.contextmanager
def holding(path: Path) -> Iterator[Holder]:
    holder = Holder(path)
    try:
        yield holder
    finally:
        holder.let_go()


class OnWarning(logging.Handler):
    """Lets the holder of a database go as soon as a warning names it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.holder: Holder | None = None
        self.num_warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        holder = self.holder
        if holder and f"locked by process {holder.pid} (" in record.getMessage():
            self.num_warnings, self.holder = self.num_warnings + 1, None
            holder.let_go()


@pytest.fixture
def on_warning() -> Iterator[OnWarning]:
    handler = OnWarning()
    database.log.addHandler(handler)
    yield handler
    database.log.removeHandler(handler)


async def test_a_run_whose_ledger_is_held_before_every_decision_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_warning: OnWarning
):
    """Each wait of the loop meets a process that holds the ledger; no wait blocks the event loop."""
    free, num_waits = Ledger.free, 0
    monkeypatch.setattr(database, "_FIRST_WARNING_S", 0.0)

    async def held(self: Ledger) -> None:
        nonlocal num_waits
        if on_warning.holder:
            return await free(self)
        num_waits += 1
        # Not in a thread: another task could meet the holder before this one knows which it is.
        on_warning.holder = Holder(self._path)
        await free(self)

    def not_blocking(self: Database, action: Any) -> Any:
        assert on_warning.holder is None, "a statement waits although the loop could have awaited"
        return patiently(self, action)

    patiently = Database._retry_while_locked
    config = make_run(tmp_path, 2)
    monkeypatch.setattr(Ledger, "free", held)
    async with surviving_services() as services:
        monkeypatch.setattr(Database, "_retry_while_locked", not_blocking)
        outcome = await services.run(config)
        assert (outcome.version, services.rank.trained) == (2, [0, 1])
    # Begun, epoch, three publications, two batches, three evaluations, two saves, and the export.
    assert on_warning.num_warnings == num_waits >= 13
    with closing(LedgerReader(config.run_dir)) as recorded_ledger:
        assert [row["version"] for row in recorded_ledger.all(Kind.FINISHED)] == [1, 2]


async def test_a_run_whose_ledger_is_held_waits_before_it_is_opened(tmp_path: Path, on_warning: OnWarning):
    config = make_run(tmp_path, 1)
    async with surviving_services() as services:
        await services.run(config)
        on_warning.holder = Holder(config.run_dir / LEDGER)
        assert (await services.run(config.model_copy(update={"num_steps": 2}))).version == 2
    assert on_warning.num_warnings == 1


def test_every_method_waits_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_warning: OnWarning):
    path = tmp_path / LEDGER
    monkeypatch.setattr(database, "_FIRST_WARNING_S", 0.0)
    with closing(Ledger(path)) as opened:

        def decide_at_once() -> None:
            with opened.transaction():
                opened.record(Kind.SELECTED, 0)

        for write in (
            lambda: opened.record(Kind.EPOCH),
            decide_at_once,
            lambda: opened.keep_outcomes(0, {"p": (1, 2)}),
        ):
            on_warning.holder = Holder(path)
            write()
        assert on_warning.num_warnings == 3
        assert opened.num_rows() == 2 and opened.success_rates(1, None) == {"p": 2.0}


async def test_a_wait_can_be_interrupted(tmp_path: Path):
    with closing(Ledger(tmp_path / LEDGER)) as opened, holding(tmp_path / LEDGER):
        waiting = asyncio.create_task(opened.free())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_a_failed_run_does_not_wait_long_to_record_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("services.coordinator.runs.run._FAILURE_PATIENCE_S", 0.1)
    config = make_config(runs_dir=tmp_path)
    with closing(Run(config, open_run(config))) as run, holding(config.run_dir / LEDGER) as holder:
        run.record_failure(ValueError("because"))
    assert "the failure of the run is not recorded" in caplog.text and f"process {holder.pid} (" in caplog.text


@pytest.mark.parametrize("on_shared_disk", [False, True])
def test_a_ledger_that_is_being_written_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_shared_disk: bool
):
    monkeypatch.setattr(ledger, "is_shared", lambda path: on_shared_disk)
    monkeypatch.setattr(reader, "_PATIENCE_S", 0.1)
    with closing(Ledger(tmp_path / LEDGER)) as opened:
        opened.record(Kind.EPOCH, num_replicas=3)
        assert (tmp_path / f"{LEDGER}-wal").exists() is not on_shared_disk
        before = sorted(tmp_path.iterdir())
        with closing(LedgerReader(tmp_path)) as reading:
            assert reading.all(Kind.EPOCH) == [{"version": None, "num_replicas": 3}]
            assert sorted(tmp_path.iterdir()) == before
            with holding(tmp_path / LEDGER) as holder:
                if not on_shared_disk:
                    assert len(reading.rows()) == 1
                    return
                with pytest.raises(
                    Unavailable, match=rf"ledger\.sqlite is locked by process {holder.pid} \("
                ) as caught:
                    reading.rows()
                assert caught.value.reason is Reason.STORAGE_FAILED


def test_a_ledger_moves_between_disks_of_both_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for index, on_shared_disk in enumerate((False, True, False, True)):
        monkeypatch.setattr(ledger, "is_shared", lambda path, shared=on_shared_disk: shared)
        with closing(Ledger(tmp_path / LEDGER)) as opened:
            opened.record(Kind.EPOCH, index)
            assert [row["version"] for row in opened.all(Kind.EPOCH)] == list(range(index + 1))
            assert (tmp_path / f"{LEDGER}-wal").exists() is not on_shared_disk


_MOUNTS = """overlay / overlay rw 0 0
proc /proc proc rw 0 0
/dev/sda1 /data ext4 rw 0 0
host:/export /data/shared nfs4 rw 0 0
//host/share /mnt/a\\040share cifs rw 0 0
fs /lustre lustre rw,flock 0 0
tmpfs /lustre/local tmpfs rw 0 0
me@host: /home/me/remote fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/tmp/run", False),
        ("/data/run", False),
        ("/data/shared/runs/run", True),
        ("/mnt/a share/run", True),
        ("/lustre/run", True),
        ("/lustre/local/run", False),
        ("/home/me/remote", True),
        ("/data/sharedother", False),
    ],
)
def test_a_disk_is_shared_if_other_hosts_mount_it(tmp_path: Path, path: str, expected: bool):
    mounts = tmp_path / "mounts"
    mounts.write_text(_MOUNTS)
    assert is_shared(Path(path), mounts) is expected


_CODES = {name: getattr(sqlite3, name) for name in dir(sqlite3) if name.startswith("SQLITE_")}
_ERRORS = [name for name, code in _CODES.items() if isinstance(code, int) and 0 < code < 27 and name.count("_") == 1]


@pytest.mark.parametrize("name", [name for name in _ERRORS if name not in ("SQLITE_BUSY", "SQLITE_LOCKED")])
def test_every_error_of_sqlite_names_the_file_and_the_fix(tmp_path: Path, name: str):
    error = sqlite3.OperationalError("it failed")
    error.sqlite_errorcode = _CODES[name] | 5 << 8  # an extended code
    with closing(Database(tmp_path / LEDGER)) as opened, pytest.raises(LockstepError) as caught:
        opened._retry_while_locked(lambda: (_ for _ in ()).throw(error))
    assert caught.value.message.startswith(str(tmp_path / LEDGER)) and "it failed" in caught.value.message
    assert ";" in caught.value.message


def test_a_closed_ledger_is_an_error_of_this_project(tmp_path: Path):
    opened = Ledger(tmp_path / LEDGER)
    opened.close()
    with pytest.raises(InternalError, match=r"ledger\.sqlite: Cannot operate on a closed"):
        opened.all(Kind.EPOCH)


def filled(path: Path) -> bytes:
    with closing(Ledger(path)) as opened:
        opened.record(Kind.OPENED, run_id="run-1", config="{}", checkpoint="", versions={"lockstep-rl": "1"})
        for version in range(20):
            opened.record(Kind.SELECTED, version, metrics={"x": version / 7}, dropped=["p1", "p2"])
            opened.keep_outcomes(version, {f"p{index}": (4, index) for index in range(5)})
            opened.record(Kind.FINISHED, version, **{"reward/mean": version / 20, "time/step_s": 1.0})
            opened.record(Kind.SAVED, version, path=f"checkpoints/step-{version:06d}", manifest_digest="ab" * 32)
    return path.read_bytes()


def read_all(opened: Ledger) -> list[Any]:
    found: list[Any] = [opened.all(kind) for kind in Kind]
    found += [opened.last(kind) for kind in Kind]
    return [*found, opened.checkpoints(Kind.SAVED), opened.last_finished(), opened.failure(), opened.num_rows()]


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Any]]:
    """Returns the bytes of a ledger and everything in it."""
    path = tmp_path_factory.mktemp("undamaged") / LEDGER
    content = filled(path)
    with closing(Ledger(path)) as opened:
        return content, read_all(opened)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_harmless_or_names_the_ledger(
    tmp_path: Path, undamaged: tuple[bytes, list[Any]], data: st.DataObject
):
    path, (intact, expected) = tmp_path / LEDGER, undamaged
    content = bytearray(intact)
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        with closing(Ledger(path)) as opened:
            found = read_all(opened)
    except LockstepError as error:
        assert str(path) in error.message
    else:
        assert found == expected
    path.write_bytes(content)
    with contextlib.suppress(LockstepError), closing(LedgerReader(tmp_path)) as reading:
        read_all(reading)
        reading.rows()
        reading.times()


def test_a_changed_digest_blames_the_ledger_and_not_the_checkpoint(tmp_path: Path):
    path = tmp_path / LEDGER
    content = filled(path)
    path.write_bytes(content.replace(b"ab" * 32, b"ab" * 31 + b"aa", 1))
    with pytest.raises(DataLoss, match=r"ledger\.sqlite is damaged: row \d+ \(saved\) is not what was written"):
        Ledger(path)


@pytest.mark.parametrize("name", [LEDGER, f"{LEDGER}-wal"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_deleted_file_of_the_ledger_is_named_at_the_next_decision(tmp_path: Path, name: str, replaced: bool):
    with closing(Ledger(tmp_path / LEDGER)) as opened:
        opened.record(Kind.EPOCH)
        (tmp_path / name).rename(tmp_path / "elsewhere")
        if replaced:
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(LockstepError) as caught:
            opened.record(Kind.EPOCH)
    assert (
        caught.value.message.startswith(f"{tmp_path / name} cannot be written: it is gone, ")
        and caught.value.reason is Reason.STORAGE_FAILED
    )


async def test_a_ledger_that_is_deleted_during_a_run_is_what_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = make_run(tmp_path, 3)
    free = Ledger.free

    async def deleting(self: Ledger) -> None:
        if self.last(Kind.FINISHED, 1) and self._path.exists():
            self._path.unlink()
        await free(self)

    monkeypatch.setattr(Ledger, "free", deleting)
    async with surviving_services() as services:
        with pytest.raises(LockstepError, match=r"ledger\.sqlite cannot be written: it is gone") as caught:
            await services.run(config)
    assert caught.value.reason is Reason.STORAGE_FAILED


@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        ("nfs rw,vers=3,nolock,hard", True),
        ("nfs4 rw,vers=4.2,local_lock=flock", True),
        ("nfs4 rw,vers=4.2,local_lock=none", False),
        ("nfs rw,vers=3,lock", False),
        ("ext4 rw,nolock", False),
    ],
)
def test_locks_of_nfs_may_be_those_of_one_host(tmp_path: Path, mount: str, expected: bool):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/runs /claim {mount} 0 0\n")
    assert has_local_locks(Path("/claim/runs"), mounts) is expected
    assert not has_local_locks(Path("/other"), mounts)
