"""Tests agents that are commands: what they can reach, what is left of them, and what is collected."""

import asyncio
import errno
import json
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from services.common.config.environment import AgentEnvironmentConfig
from services.coordinator.clients.environment import EpisodeFailed
from services.reward.agents import command
from services.reward.agents.runners import Part
from services.reward.errors import EnvironmentFailure, EpisodeError, ScoringError
from tests.agents.harness import is_running, staged
from tests.support import until

# Tries what an attacker would, and prints what worked.
_ATTACK = """
import contextlib, ctypes, glob, pathlib, pty, socket, subprocess
ask("hello")
found = []
for host in ("1.1.1.1", "10.0.0.1"):
    try:
        socket.create_connection((host, 53), 0.5)
        found.append("net " + host)
    except OSError:
        pass
try:
    socket.socket(socket.AF_VSOCK)
    found.append("vsock")
except OSError:
    pass
for path in ("/etc/shadow", SECRET, "/proc/1/environ", "/proc/1/mem"):
    try:
        open(path, "rb").read(1)
        found.append("read " + path)
    except OSError:
        pass
for path in ("/usr/x", "/etc/x", "/x", "/dev/x"):
    try:
        open(path, "w")
        found.append("write " + path)
    except OSError:
        pass
try:
    with open("/tmp/big", "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    found.append("disk")
except OSError:
    pass
os.remove("/tmp/big")
with contextlib.suppress(OSError):
    pty.openpty()
    found.append("terminal")
if os.readlink("/dev/stdin") != "/proc/self/fd/0" or not os.listdir("/dev/fd"):
    found.append("no /dev/fd")
open("/dev/shm/x", "w").write("x")
row = json.load(open(os.environ["LOCKSTEP_ROW"]))
found += [key for key in row if key not in ("prompt", "level")]
pathlib.Path("reward.txt").write_text("1000")
pathlib.Path("out/deep").mkdir(parents=True)
pathlib.Path("out/deep/a").write_text("a")
pathlib.Path("big.txt").write_bytes(bytes(1 << 20))
os.symlink("/etc/passwd", "link.txt")
os.mkfifo("fifo.txt")
for _ in range(200):
    try:
        subprocess.Popen(["sleep", "1000"])
    except OSError:
        found.append("no more processes")
        break
print(json.dumps([found, dict(os.environ), os.getcwd()]), end="")
"""


@pytest.mark.parametrize("has_terminals", [True, False])
async def test_an_agent_reaches_the_model_and_nothing_else(
    program, tmp_path: Path, has_terminals: bool, monkeypatch: pytest.MonkeyPatch
):
    if not has_terminals:  # as in a container whose filter refuses what bwrap makes /dev/pts with
        monkeypatch.setattr(command, "_DEV", ("--dev", "/proc/refused"))
    secret = tmp_path / "secret"
    secret.write_text("the answers")
    source = _ATTACK.replace("SECRET", repr(str(secret)))
    settings = program(source, collect=["*.txt", "out/**"], max_processes=40, max_disk_mib=8, max_files_mib=0.5)
    async with staged(lambda text, seed: "hi", columns=["level"], **settings) as stage:
        group = await stage.play(level=3, tests="hidden")
        assert group is not None and group.left[0]
        found, environ, place = json.loads(group.left[0].text)
        assert found == ["terminal"] * has_terminals + ["no more processes"] and place == "/workspace"
        assert environ["OPENAI_BASE_URL"] == environ["ANTHROPIC_BASE_URL"] + "/v1"
        assert environ["ANTHROPIC_API_KEY"] == environ["OPENAI_API_KEY"] and environ["ANTHROPIC_MODEL"] == "policy"
        assert not [name for name in environ if name.startswith(("PYTEST", "VIRTUAL", "SSH"))]
        kept = {"reward.txt": b"1000", "out/deep/a": b"a"}
        assert group.left[0].files == kept, "no link, no pipe, and nothing above max_files_mib"
        assert group.scores[0].reward == 0.0, "what the agent writes is no reward"


# test_episodes.py ends an agent that takes too long.
@pytest.mark.parametrize(
    ("how", "settings"),
    [("ends", {}), pytest.param("stays", {"episode_s": 20.0}, marks=pytest.mark.long), ("stays", {})],
)
async def test_nothing_is_left_of_an_agent_that_ends_is_ended_or_is_abandoned(program, how: str, settings: dict):
    mark = f"mark-{os.getpid()}-sleep"
    source = (
        "import subprocess, sys, time\nask('x')\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', sys.argv[1]], start_new_session=True)"
        "\nif sys.argv[2] == 'stays': time.sleep(1000)"
    )
    async with staged(lambda text, seed: "hi", **program(source, mark, how, **settings)) as stage:
        playing = asyncio.create_task(stage.play())
        if how == "ends":
            assert await playing
        else:
            await until(lambda: len(is_running(mark)) >= 2)  # the program and its child
            if not settings:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
            else:
                with pytest.raises(EpisodeFailed, match="episode_s"):
                    await playing
        await until(lambda: not is_running(mark))
        await until(lambda: not stage.servicer.agents._endpoint._servers)


@pytest.mark.skipif(os.getuid() != 0, reason="programs run as the user of the service")
async def test_what_nobody_cannot_reach_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "inner").mkdir()
    tmp_path.chmod(0o700)
    for mounts, fix in ((str(tmp_path / "inner"),), "move it"), ((), "set TMPDIR"):
        runner = command.CommandRunner(AgentEnvironmentConfig(command=("true",), mounts=mounts))
        with pytest.raises(EpisodeError, match=rf"cannot reach .*: {fix}.* chmod o\+x /") as caught:
            await runner.open()
        assert caught.value.reason is EnvironmentFailure.REFUSED
        await runner.close()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


async def test_another_episodes_key_is_refused_at_this_ones_socket(program):
    source = """
import sys, time, urllib.error
keys = json.loads(ask("keys"))
statuses = []
for key in keys:
    os.environ["OPENAI_API_KEY"] = key
    try:
        ask("mine?")
        statuses.append(200)
    except urllib.error.HTTPError as error:
        statuses.append(error.code)
print(sorted(statuses), end="")
"""
    async with staged(lambda text, seed: "hi", **program(source)) as stage:
        endpoint = stage.servicer.agents

        keys: list[str] = []

        async def both(text: str) -> None:
            if not keys:  # at the first call of each episode; later one of them may have ended
                await until(lambda: len(endpoint._endpoint._lines) == 2 or len(keys) == 2)  # type: ignore[union-attr]
                keys[:] = keys or list(endpoint._endpoint._lines)  # type: ignore[union-attr]

        def says(text: str, seed: int) -> str:
            return json.dumps(keys) if "keys" in text else "yes"

        stage.engine.delay, stage.engine.says = both, says
        group = await stage.play(num_samples=2)
        assert group is not None
        # One may have ended before the other asks with its key, which is 401 too.
        assert [left.text for left in group.left if left] == ["[200, 401]"] * 2
        assert stage.collector.take_metrics()["environment/refused_calls"] == 2


async def test_a_program_is_filled_in_once_and_its_setup_runs_before():
    values = {"prompt": "say {key} {{x}}", "key": "secret", "seed": "7", "url": "http://u"}
    assert command._substitute("{prompt} {seed} {other}", values) == "say {key} {{x}} 7 {other}"
    settings = {"setup": ["sh", "-c", "echo no >&2; exit 3"], "command": ["true"]}
    async with staged(lambda text, seed: "hi", **settings) as stage:
        with pytest.raises(EpisodeFailed, match="setup ended with exit code 3: no"):
            await stage.play()


async def test_a_program_that_a_signal_ends_fails_even_if_it_says_nothing(program):
    source = "ask('x')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    async with staged(lambda text, seed: "hi", **program(f"import signal\n{source}")) as stage:
        with pytest.raises(EpisodeFailed, match=r"ended by signal 9: its standard error is empty: its calls are in"):
            await stage.play()


async def test_a_program_that_breaks_before_its_first_call_fails_with_what_it_says(program):
    async with staged(lambda text, seed: "hi", **program("import no_such_package")) as stage:
        with pytest.raises(EpisodeFailed, match=r"(?s)never called .*No module named 'no_such_package'$"):
            await stage.play()


async def test_a_program_that_ends_at_a_limit_is_one_line_of_the_log(program, caplog):
    caplog.set_level(logging.INFO)
    for most, level, start in (
        (1, logging.INFO, "urllib.error.HTTPError: HTTP Error 400"),
        (2, logging.WARNING, "Trace"),
    ):
        async with staged(
            lambda text, seed: "hi", **program("ask('x')\nask('y')\nraise OSError", max_calls=most)
        ) as stage:
            assert await stage.play()
        (line,) = [one for one in caplog.records if " ended with exit code 1: " in one.getMessage()]
        assert line.levelno == level and line.getMessage().partition("code 1: ")[2].startswith(start)
        caplog.clear()


async def test_an_interrupt_of_the_first_process_ends_nothing(program):
    source = "import signal\nask('x')\nos.kill(1, signal.SIGINT)\n"
    source += "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, end='')"
    async with staged(lambda text, seed: "hi", **program(source)) as stage:
        group = await stage.play()
        assert group is not None and group.left[0] and group.left[0].text == "True"


async def test_directories_that_are_nested_too_deep_to_search_are_no_failure_of_the_episode(program):
    source = "ask('x')\nopen('a.txt', 'w').write('left')\n"
    source += "for _ in range(2000):\n    os.mkdir('d')\n    os.chdir('d')\nprint('done', end='')"
    async with staged(lambda text, seed: "hi", **program(source, collect=["**/*.py", "a.txt"])) as stage:
        group = await stage.play()
        assert group is not None and group.left[0] and group.left[0].text == "done"
        assert group.left[0].files["a.txt"] == b"left"


async def test_a_collected_program_is_tested_in_another_sandbox(program):
    source = "ask('x')\nopen('solution.py', 'w').write('print(int(input()) * 2)')\nprint('def lies(): pass')"
    tests = json.dumps({"inputs": ["4\n"], "outputs": ["8\n"]})
    scorers = [{"kind": "code", "file": "solution.py"}, {"kind": "code", "name": "other", "file": "absent.py"}]
    settings = program(source, collect=["*.py"])
    async with staged(lambda text, seed: "hi", scorers=scorers, **settings) as stage:
        group = await stage.play(tests=tests)
        assert group is not None and dict(group.scores[0].components) == {"code": 1.0, "other": 0.0}


async def test_a_prompt_of_messages_is_filled_in_if_it_is_one_of_a_user():
    user, system = {"role": "user", "content": "1 + 1?"}, {"role": "system", "content": "Be brief."}
    for prompt in ("1 + 1?", [user]):
        assert command._prompt_text(["a", "-t={prompt}"], {"prompt": prompt}) == "1 + 1?"
    assert command._prompt_text(["a"], {"prompt": [system, user]}), "the program reads the row itself"
    runner = command.CommandRunner(AgentEnvironmentConfig(command=("a", "-t={prompt}")))
    part = Part("e", 0, {"prompt": [system, user]}, "key", lambda _: asyncio.sleep(0), "")
    with pytest.raises(EpisodeError, match=r"system, user, .*LOCKSTEP_ROW"):
        await runner.run(part)


@pytest.mark.parametrize("begin", [lambda sandbox: sandbox.start({}), lambda sandbox: sandbox.run("", [])])
@pytest.mark.parametrize("num_free", range(5))
async def test_a_start_without_descriptors_leaves_none_open(
    begin: Callable[[command.AgentSandbox], AbstractAsyncContextManager[object]],
    num_free: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox = command.AgentSandbox(AgentEnvironmentConfig(kind="agent", command=["true"]))
    await sandbox.open()
    before, left = os.listdir("/proc/self/fd"), iter(range(num_free))

    def limited(function):
        def opens(*arguments: object):
            if next(left, None) is None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return function(*arguments)

        return opens

    for owner, name in ((os, "pipe"), (os, "memfd_create"), (socket, "socketpair")):
        monkeypatch.setattr(owner, name, limited(getattr(owner, name)))
    with pytest.raises((OSError, EpisodeError, ScoringError), match="Too many open files"):
        async with begin(sandbox):
            pass
    assert os.listdir("/proc/self/fd") == before
    sandbox.close()
