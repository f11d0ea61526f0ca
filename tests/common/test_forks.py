"""Tests the process from which services are forked, with a toy service."""

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from services.common.errors import Reason, Unavailable
from services.common.forks import Forked, Forks
from services.common.rpc.server import incarnation
from tests.support import PATIENCE_S, raises, still_there, until

TOY = "tests.common.toy_fork"


def seen(log: Path) -> dict[str, Any]:
    return json.loads(log.read_text())


async def waiting(forks: Forks, log: Path) -> Forked:
    """Starts a toy that waits to be killed, and returns it when it has begun."""
    process = await forks.start(TOY, ["wait"], log, {})
    await until(lambda: log.exists() and log.read_text().endswith("\n"))
    return process


async def test_a_fork_is_what_a_new_interpreter_would_be(tmp_path: Path) -> None:
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    with Forks() as forks:
        processes = [await forks.start(TOY, ["3", "a b"], log, {"TOY_GIVEN": log.name}) for log in logs]
        assert [await process.wait() for process in processes] == [3, 3]
        assert [process.returncode for process in processes] == [3, 3]
    one, two = map(seen, logs)
    assert one["argv"] == [TOY, "3", "a b"] and (one["given"], two["given"]) == ("one.log", "two.log")
    assert one["preloaded"] is None, "the environment is that of the parent's start"
    assert [one["session"], two["session"]] == [process.pid for process in processes]
    assert one["imported_in"] == two["imported_in"] not in (os.getpid(), *(process.pid for process in processes))
    assert len({one["incarnation"], two["incarnation"], incarnation()}) == 3 and one["token"] != two["token"]


async def test_a_fork_ends_in_order_without_taking_its_imports_apart(tmp_path: Path) -> None:
    with Forks() as forks:
        process = await forks.start(TOY, ["0", "last words"], tmp_path / "log", {})
        assert await process.wait() == 0
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["last words"]


async def test_ends_are_told_with_their_signal_and_the_command_is_visible(tmp_path: Path) -> None:
    with Forks() as forks:
        process = await waiting(forks, tmp_path / "log")
        assert f"-m {TOY} wait" in Path(f"/proc/{process.pid}/cmdline").read_text()
        os.kill(process.pid, signal.SIGTERM)
        assert await process.wait() == -signal.SIGTERM


async def test_a_parent_that_is_killed_is_started_again(tmp_path: Path) -> None:
    """Its services are killed, because nobody would learn how they end, and are gone when they count as dead."""
    with Forks() as forks:
        first = await waiting(forks, tmp_path / "first.log")
        os.kill(seen(tmp_path / "first.log")["imported_in"], signal.SIGKILL)
        assert await first.wait() == -signal.SIGKILL and not first.why
        assert not still_there([first.pid], after_s=0)
        second = await forks.start(TOY, ["0"], tmp_path / "second.log", {})
        assert await second.wait() == 0


async def test_a_failed_import_is_an_error_with_its_traceback(tmp_path: Path) -> None:
    with Forks() as forks, raises(Unavailable, reason=Reason.SERVICE_DIED) as caught:
        await forks.start("tests.common.no_such_service", [], tmp_path / "log", {})
    assert "ModuleNotFoundError" in caught.value.message


async def test_a_failed_import_is_why_the_forks_before_it_count_as_killed(tmp_path: Path) -> None:
    with Forks() as forks:
        process = await waiting(forks, tmp_path / "log")
        forks.preload("tests.common.no_such_service")
        assert await process.wait() == -signal.SIGKILL
        assert "ModuleNotFoundError" in process.why and not still_there([process.pid], after_s=0)


async def test_a_fork_that_is_killed_before_it_has_a_session_ends_too() -> None:
    with subprocess.Popen(["sleep", "600"]) as begun:
        assert os.getpgid(begun.pid) != begun.pid
        process = Forked(begun.pid)
        process.kill()
        try:
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == -signal.SIGKILL
        finally:
            begun.kill()


async def test_nothing_is_left(tmp_path: Path) -> None:
    """A start that is canceled leaves no process, and the parent ends with the block, but not its services."""
    with Forks() as forks:
        process = await waiting(forks, tmp_path / "log")
        starting = asyncio.create_task(forks.start(TOY, ["wait"], tmp_path / "canceled.log", {}))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        after = await forks.start(TOY, ["0"], tmp_path / "after.log", {})
        assert await after.wait() == 0
        canceled = [other for other in forks._forked.values() if other is not process]
        assert [await other.wait() for other in canceled] in ([], [-signal.SIGKILL])
        parent = seen(tmp_path / "log")["imported_in"]
    assert not still_there([parent])
    assert process.returncode == -signal.SIGKILL
    os.kill(process.pid, signal.SIGKILL)
