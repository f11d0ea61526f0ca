"""Tests what a run says of an agent's mistakes: the line of an error or of a hang, exit codes, no text to score."""

import asyncio
import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.coordinator.clients.environment import EpisodeFailed
from services.reward.environments.executor import _write_stack, in_thread
from tests.agents.harness import ASK, staged

AGENTS = "tests.agents.user_agents"
ENDS = "\nimport sys\nask('hello')\nsys.exit('Traceback:\\nKeyError: 4')\n"


def says(text: str, seed: int) -> str:
    return "4"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the coordinator's warnings, which the terminal shows."""
    name = "services.coordinator.rl.sampling.agents"
    return [record.getMessage() for record in caplog.records if record.name == name]


async def test_a_command_with_an_exit_code_is_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "agent.py").write_text(ASK + ENDS + "print('4', end='')\n")
    files = {"agent.py": str(tmp_path / "agent.py")}
    async with staged(says, command=["python", "-S", "agent.py"], files=files, collect=["agent.py"]) as stage:
        for _ in range(2):
            group = await stage.play()
            assert group is not None and group.left[0] and group.left[0].exit_code == 1
    ended = "the command ended with exit code 1, and what it has left is scored as it is"
    assert warnings_of(caplog) == [f"prompt p0 sample 0: {ended}: KeyError: 4"]


async def test_an_exit_code_without_an_error_is_a_warning_that_ends_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "agent.py").write_text(f"{ASK}\nask('hello')\nraise SystemExit(1)\n")
    files = {"agent.py": str(tmp_path / "agent.py")}
    async with staged(says, command=["python", "-S", "agent.py"], files=files, collect=["agent.py"]) as stage:
        await stage.play()
    assert [warning.endswith("is scored as it is") for warning in warnings_of(caplog)] == [True]


async def test_a_group_of_agents_without_a_text_is_a_warning_once(caplog: pytest.LogCaptureFixture):
    async with staged(says, path=f"{AGENTS}:forgets") as stage:
        await stage.play(num_samples=1)
        assert warnings_of(caplog) == [], "one agent may have given up"
        for _ in range(2):
            assert await stage.play(num_samples=2)
    none = "prompt p0: none of its 2 agents has returned a text: scorers get an empty one"
    assert warnings_of(caplog) == [none]
    caplog.clear()
    async with staged(says, path=f"{AGENTS}:twice") as stage:
        assert await stage.play(num_samples=2)
    assert warnings_of(caplog) == []


async def test_an_error_of_a_library_names_the_line_of_the_agent():
    async with staged(says, path=f"{AGENTS}:parses") as stage:
        with pytest.raises(EpisodeFailed) as failure:
            await stage.play()
    said = re.escape(
        "environment: crashed: JSONDecodeError: Extra data: line 1 column 2 (char 1) (user_agents.py, line "
    )
    assert re.fullmatch(said + r"\d+\): its calls are in .*\.jsonl", failure.value.message)


async def test_an_agent_that_returns_a_reward_is_told_where_rewards_come_from():
    async with staged(says, path=f"{AGENTS}:returns_a_reward") as stage:
        said = r"invalid_reply: the agent returned 1\.0: return its final text, .* comes from reward\.scorers"
        with pytest.raises(EpisodeFailed, match=said):
            await stage.play()


async def test_a_function_that_hangs_leaves_its_place_in_the_log(capfd: pytest.CaptureFixture[str]):
    async with staged(says, path=f"{AGENTS}:hangs", episode_s=3) as stage:
        with pytest.raises(
            EpisodeFailed, match=r"timeout: the episode took longer than 3 s \(environment\.episode_s\)"
        ):
            await stage.play()
    said = capfd.readouterr().err.partition("the function does not end; it is in:\n")[2]
    assert re.match(r'  File ".*/user_agents\.py", line \d+, in hangs\n    threading\.Event\(\)\.wait\(\)\n', said)


def test_a_thread_whose_function_has_ended_has_no_place_in_the_log(capfd: pytest.CaptureFixture[str]):
    began, ends = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: began.set() or ends.wait(), daemon=True)
    thread.start()
    assert began.wait(60) and thread.ident
    _write_stack([thread.ident], "function")
    ends.set()
    thread.join()
    assert capfd.readouterr().err == ""


async def test_an_error_after_the_end_of_an_episode_is_not_written():
    began, ends, written = threading.Event(), threading.Event(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: written.append(context))

    def fails() -> None:
        began.set()
        ends.wait()
        raise ValueError

    with ThreadPoolExecutor(1) as threads:
        task = asyncio.create_task(in_thread(threads, "function", fails))
        assert await asyncio.to_thread(began.wait, 60)
        task.cancel()
        await asyncio.wait({task}, timeout=0)
        ends.set()
        await asyncio.wait({task})
    assert task.cancelled()
    del task
    gc.collect()
    assert written == []
