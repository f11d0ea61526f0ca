"""Tests what is left, played again and trained when something is killed in the middle of a call."""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lockstep.reward.v1.agent_pb2 import AgentEnd, PlayResponse

from services.coordinator.clients.environment import EnvironmentFailure
from services.coordinator.rl.sampling import agents
from services.reward.agents.servicer import AgentServicer
from tests.agents.harness import Stage, is_running, staged, table_of, trained
from tests.agents.in_process import caught
from tests.support import PATIENCE_S, ROOT, free_port, running, service_command, until

Program = Callable[..., dict[str, Any]]
# Asks twice; the second call hangs in its first episode. A child would outlive it.
_SOURCE = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", sys.argv[1]], start_new_session=True)
ask("one")
print(ask("two"), end="")
"""
ANSWER = "4"


def _pids(mark: str) -> list[int]:
    return sorted(int(Path(path).parent.name) for path in is_running(mark) if Path(path).parent.name.isdecimal())


async def _ends(mark: str, limit_s: float) -> None:
    """Checks that no process with `mark` is left after some time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await until(lambda: not is_running(mark))
    assert not is_running(mark)


def _hang_once(stage: Stage) -> tuple[asyncio.Event, asyncio.Event]:
    """Makes the first call that says `two` hang. Returns the events of its begin and of its end."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def delay(text: str) -> None:
        if "two" in text and not begun.is_set():
            begun.set()
            await ended.wait()

    for engine in stage.engines:
        engine.delay = delay
    return begun, ended


async def _is_played_again(stage: Stage, playing: "asyncio.Task[Any]", failure: EnvironmentFailure) -> None:
    """Checks that the group has a whole episode in place of the lost one, and nothing of that."""
    group = await playing
    assert group is not None and group.left[0]
    assert (group.left[0].exit_code, group.left[0].text) == (0, ANSWER)
    assert [score.reward for score in group.scores] == [1.0]
    (*_, first, second), rows = [answer for _, answer in stage.engine.log], table_of(group).to_pylist()
    assert [tokens for row in rows for tokens in trained(row)] == [list(first), list(second)]
    assert stage.collector.take_metrics()[f"environment/failed_{failure}"] == 1


def _failure_is_an_end(
    self: AgentServicer, begin: Any, playing: "asyncio.Task[Any]", *_: Any, **__: Any
) -> PlayResponse:
    if playing.exception() is None:
        end = AgentEnd(exit_code=playing.result().exit_code, text=playing.result().text)
        return PlayResponse(end=end)
    return PlayResponse(end=AgentEnd(exit_code=-9))


@pytest.mark.parametrize("mutant", ["", "a failure is an outcome"])
async def test_an_agent_that_is_killed_is_played_again(program: Program, mutant: str, monkeypatch: pytest.MonkeyPatch):
    if mutant:
        monkeypatch.setattr(AgentServicer, "_end_message", _failure_is_an_end)
    mark = f"mark-{os.getpid()}-agent"
    async with staged(lambda text, seed: ANSWER, **program(_SOURCE, mark, max_retries=1)) as stage:
        begun, ended = _hang_once(stage)
        playing = asyncio.create_task(stage.play())
        await begun.wait()
        (first,) = [pid for pid in _pids(mark) if "agent.py" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(first, signal.SIGKILL)
        await until(lambda: not is_running(mark))
        ended.set()
        with caught(mutant):
            await _is_played_again(stage, playing, EnvironmentFailure.CRASHED)
        await until(lambda: not is_running(mark))
        assert not stage.servicer.agents._endpoint._servers  # type: ignore[union-attr]


@pytest.mark.parametrize("mutant", ["", "seeds depend on what was played before"])
async def test_a_call_goes_on_elsewhere_when_its_replica_is_killed(mutant: str, monkeypatch: pytest.MonkeyPatch):
    if mutant:
        numbers = itertools.count()
        monkeypatch.setattr(agents, "seed_of", lambda *_: next(numbers))
    settings = {"path": "tests.agents.user_agents:twice", "num_workers": 1}
    async with staged(lambda text, seed: f"{seed % 1000}", num_replicas=2, **settings) as stage:
        alone = await stage.rows()
        begun, _ = _hang_once(stage)
        playing = asyncio.create_task(stage.rows())
        await begun.wait()
        (busy,) = [engine for engine in stage.engines if engine.in_flight]
        await busy.die()
        again = await playing
        with caught(mutant):
            assert again == alone, "the same seeds, and so the same tokens, trained once"


@pytest.mark.long
async def test_nothing_is_left_of_a_service_that_is_killed_and_its_episode_is_played_again(
    program: Program, tmp_path: Path
):
    mark, address = f"mark-{os.getpid()}-service", f"127.0.0.1:{free_port()}"
    settings = program(_SOURCE, mark, max_retries=2)
    log = tmp_path / "log"
    with running(service_command("reward", address), log) as service:
        async with staged(lambda text, seed: ANSWER, service=address, **settings) as stage:
            begun, _ = _hang_once(stage)
            playing = asyncio.create_task(stage.play())
            await begun.wait()
            before = len(is_running(mark))
            service.kill()
            service.wait()
            await until(lambda: not is_running(mark))
            assert before >= 2 and not list(Path("/tmp").glob("lockstep-agents-*"))
            with running(service_command("reward", address), log):
                await _is_played_again(stage, playing, EnvironmentFailure.LOST)


_COORDINATOR = """
import asyncio, sys
from lockstep.types.v1.types_pb2 import ModelCard
from tests.agents.harness import staged

async def main():
    async def hangs(text):
        print("asked", flush=True)
        await asyncio.Event().wait()
    async with staged(lambda text, seed: "4", service=sys.argv[1], command=["python", "-S", "agent.py", sys.argv[2]],
                      files={"agent.py": sys.argv[3]}) as stage:
        stage.engine.delay = hangs
        await stage.play()

asyncio.run(main())
"""


# A service that goes on with an episode whose caller is gone.
_DEAF = """
import runpy
from services.reward.agents.servicer import AgentServicer

async def goes_on(self, *_):
    pass

AgentServicer._end_episode = goes_on
runpy.run_module("services.reward", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("mutant", ["", "an episode outlives its caller"])
async def test_nothing_is_left_of_the_episodes_of_a_coordinator_that_is_killed(
    program: Program, tmp_path: Path, mutant: str
):
    mark = f"mark-{os.getpid()}-coordinator"
    settings = program(_SOURCE, mark)
    address = f"127.0.0.1:{free_port()}"
    python, *module, listen, address_of = service_command("reward", address)
    command = [python, *(["-c", _DEAF] if mutant else module), listen, address_of]
    with running(command, tmp_path / "log") as service:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", _COORDINATOR, address, mark, settings["files"]["agent.py"]],
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert process.stdout
        assert await process.stdout.readline() == b"asked\n"
        inside = [pid for pid in _pids(mark) if pid != process.pid]
        process.kill()
        await process.wait()
        assert len(inside) >= 2 and service.poll() is None
        with caught(mutant):
            await _ends(mark, 5.0 if mutant else PATIENCE_S)
        listening = Path(f"/proc/{service.pid}/net/unix").read_text()
        assert "lockstep-agents" not in listening
