"""Tests that the ranks of a host get torchrun's variables, and that none outlives another rank or the launcher."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.common import process
from services.common.rpc.command import REFUSED, ServeOptions
from services.trainer import command
from services.trainer.ranks import rank
from tests.support import PATIENCE_S, still_there
from tests.trainer.deployment import deployed
from tests.trainer.harness_processes import few_of
from tests.trainer.toy_ranks import EXIT_CODE


@pytest.fixture
def method() -> str:
    """Provides how ranks are started where a test does not say it: what follows is the same for both."""
    return "fork"


both = pytest.mark.parametrize("method", ["fork", "spawn"])


@pytest.fixture
def started(method: str) -> Iterator[tuple[subprocess.Popen[str], list[dict[str, object]]]]:
    """Yields the launcher, which leads a session of its own, and what its ranks say, in rank order."""
    command = [sys.executable, "-m", "tests.trainer.toy_ranks", method]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as launcher:
        said = [json.loads(launcher.stdout.readline()) for _ in range(2)]
        try:
            yield launcher, sorted(said, key=lambda rank: rank["RANK"])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)


@both
def test_a_killed_rank_ends_all(started) -> None:
    launcher, ranks = started
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [("0", "0"), ("1", "1")]
    assert all(rank["WORLD_SIZE"] == rank["LOCAL_WORLD_SIZE"] == "2" for rank in ranks)
    assert ranks[0]["MASTER_ADDR"] == ranks[1]["MASTER_ADDR"] == "127.0.0.1"
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"]
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    assert launcher.wait(PATIENCE_S) == 1
    assert "rank 1 ended with exit code -9; all other ranks were ended" in launcher.stderr.read()
    assert not still_there([rank["pid"] for rank in ranks], after_s=0)


@pytest.mark.parametrize(
    ("method", "ask"), few_of([("fork", os.kill), ("spawn", os.killpg)], ("fork", "spawn"), (os.kill, os.killpg))
)
def test_rank_0_decides_how_a_trainer_ends_that_is_asked_to(started, ask: Callable[[int, int], None]) -> None:
    launcher, ranks = started
    ask(launcher.pid, signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == EXIT_CODE
    assert not still_there([rank["pid"] for rank in ranks], after_s=0)


def test_nothing_follows_the_line_in_which_rank_0_says_why_it_is_refused(started) -> None:
    launcher, ranks = started
    os.kill(ranks[0]["pid"], signal.SIGUSR1)
    assert (launcher.wait(PATIENCE_S), launcher.stderr.read()) == (REFUSED, "")


@both
def test_a_killed_launcher_leaves_no_rank(started) -> None:
    launcher, ranks = started
    launcher.kill()
    assert not still_there([rank["pid"] for rank in ranks])


def test_a_rank_has_the_threads_that_the_command_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(options: ServeOptions, threads_per_rank: int | None) -> int:
        rank._device(threads_per_rank)
        return torch.get_num_threads()

    monkeypatch.setattr(rank, "run", run)
    monkeypatch.setattr(process, "configure_logging", lambda *_: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    before = torch.get_num_threads()
    try:
        for arguments, expected in (([], 4), (["--threads-per-rank", "3"], 3)):
            with pytest.raises(SystemExit) as ended:
                command.main(arguments)
            assert ended.value.code == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.long  # the toys above are spawned too, and test_nodes.py trains with ranks that are not forked
async def test_spawned_ranks_train(trainer_files: Path) -> None:
    async with deployed("tests.trainer.spawned_trainer", trainer_files) as trainer:
        await trainer.open()
        await trainer.publish()
        assert (await trainer.train(trainer.batch())).version == 1
