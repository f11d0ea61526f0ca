"""Tests the code scorer on honest programs, and on hostile ones, which neither escape nor pass."""

import asyncio
import ctypes
import errno
import functools
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.errors import InvalidInput
from services.reward.errors import FailureReason, ScoringError
from services.reward.graders.code import find_program, read_tests
from services.reward.scoring import ScoringRun
from tests.reward.forged_verdicts import CHANGE, FORGE
from tests.reward.honest_programs import ADD, CALL, HONEST, STATEMENTS, pairs
from tests.reward.hostile_programs import BREAK, LEAVE, STEAL
from tests.support import PATIENCE_S, descendants, until

BWRAP = shutil.which("bwrap")


def _has_sandbox() -> bool:
    """Returns whether this host has bubblewrap, which `make setup` installs if it may, and allows namespaces."""
    command = [BWRAP or "", "--unshare-all", "--ro-bind", "/", "/", "true"]
    return BWRAP is not None and subprocess.run(command, capture_output=True).returncode == 0


# Nothing can replace the sandbox; on a host without it, only its absence can be tested.
sandboxed = pytest.mark.skipif(not _has_sandbox(), reason="no bubblewrap, or no namespaces, on this host")
SECRET = f"SECRET-{secrets.token_hex(16)}"
LIMITS = {
    "partial": True,
    "max_concurrent": 4,
    "max_memory_gib": 0.25,
    "max_disk_mib": 16,
    "max_processes": 12,
    "max_output_mib": 0.25,
}


@pytest_asyncio.fixture(scope="module")
async def run(open_run):
    async with open_run({"kind": "code", "timeout_s": PATIENCE_S, **LIMITS}) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module")
async def hurried_run(open_run):
    """Yields a run with a limit of 1 s, for programs that take all the time they get; its environment has a secret."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_TEST_SECRET", SECRET)
        async with open_run({"kind": "code", "timeout_s": 1, **LIMITS}) as opened:
            yield opened


@pytest.fixture(scope="module")
def score(make_item):
    async def scores(run: ScoringRun, program: str, tests: object) -> float:
        (outcome,) = await run.score([make_item(program, extra={"tests": tests})])
        assert outcome.failure is None
        return outcome.components["code"]

    return scores


@pytest.fixture(scope="module")
def attack(score):
    async def attacks(run: ScoringRun, programs: dict[str, str], tests: object) -> dict[str, float]:
        """Returns the scores above 0 by the names of the programs, four of which run at a time."""
        four = asyncio.Semaphore(4)

        async def one(program: str) -> float:
            async with four:
                async with asyncio.timeout(PATIENCE_S):  # without limits they would take forever
                    return await score(run, program, tests)

        results = await asyncio.gather(*(one(program) for program in programs.values()))
        return {name: result for name, result in zip(programs, results, strict=True) if result}

    return attacks


@pytest.fixture(scope="module")
def outside(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Yields what the programs attack, by its placeholder in them; each target would give away the secret."""
    folder = tmp_path_factory.mktemp("outside")
    folder.joinpath("canary").write_text(SECRET)
    memory = ctypes.create_string_buffer(SECRET.encode())
    listeners = [socket.create_server(("127.0.0.1", 0))]
    for name in (f"{folder}/socket", f"\0{folder}/socket"):
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(name)
        listeners[-1].listen()
    for listener in listeners:
        threading.Thread(target=_hand_out, args=(listener,), daemon=True).start()
    yield {
        "CANARY": f"{folder}/canary",
        "SOCKET": f"{folder}/socket",
        "PORT": str(listeners[0].getsockname()[1]),
        "ADDRESS": str(ctypes.addressof(memory)),
        "PID": str(os.getpid()),
    }
    for listener in listeners:
        listener.close()


def _hand_out(listener: socket.socket) -> None:
    try:
        while True:
            connection, _ = listener.accept()
            connection.sendall(SECRET.encode())
            connection.close()
    except OSError:  # closed
        return


def _aim(program: str, outside: dict[str, str]) -> str:
    for word, value in outside.items():
        program = program.replace(word, value)
    return program


@pytest.fixture(scope="module", autouse=True)
def subreaper() -> Iterator[None]:
    """Makes orphaned descendants children of this process instead of process 1, so that they can be found."""
    set_child_subreaper = functools.partial(ctypes.CDLL(None).prctl, 36)
    set_child_subreaper(1, 0, 0, 0)
    yield
    set_child_subreaper(0, 0, 0, 0)


def _foreign_processes() -> set[int]:
    """Returns our descendants in other PID namespaces; other test suites on this host have such processes too."""
    ours, found = os.readlink("/proc/self/ns/pid"), set()
    for pid in descendants(os.getpid()):
        try:
            is_zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not is_zombie and os.readlink(f"/proc/{pid}/ns/pid") not in (ours, ""):
                found.add(pid)
        except OSError:  # gone
            continue
    return found


@sandboxed
async def test_nothing_outside_can_be_read(attack, hurried_run, outside):
    programs = {name: _aim(program, outside) for name, program in STEAL.items()}
    assert await attack(hurried_run, programs, pairs(("", SECRET))) == {}


@pytest.mark.parametrize(
    "name",
    ["file by its path", "file by a symlink", "own environment", "environment of the service", "memory of the service",
     "memory of the service by proc", "TCP port of the host", "TCP port by asyncio", "UNIX socket",
     "abstract UNIX socket"],
)  # fmt: skip
async def test_outside_of_the_sandbox_those_programs_do_read_it(outside, name, tmp_path):
    program = _aim(STEAL[name], outside)
    environment = {"LOCKSTEP_TEST_SECRET": SECRET}
    if name == "environment of the service":
        program = program.replace(f"/proc/{os.getpid()}/", "/proc/self/")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=tmp_path, env=environment, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert SECRET in output.decode()


@sandboxed
async def test_nothing_gets_out_or_above_its_limits_and_nothing_is_left(attack, hurried_run, outside):
    before = _foreign_processes()
    programs = {name: _aim(program, outside) for name, program in BREAK.items()}
    assert await attack(hurried_run, programs, pairs(("", "WON"))) == {}
    assert Path(outside["CANARY"]).read_text() == SECRET
    assert _foreign_processes() <= before


@sandboxed
async def test_what_an_honest_program_leaves_ends_with_it(attack, run):
    before = _foreign_processes()
    assert await attack(run, LEAVE, pairs(("", "WON"), ("", "WON"))) == dict.fromkeys(LEAVE, 1.0)
    assert _foreign_processes() <= before


@sandboxed
@pytest.mark.parametrize("tests", [CALL, [*STATEMENTS[:1], *STATEMENTS[2:]]], ids=["call", "statements"])
async def test_no_verdict_can_be_forged(attack, score, run, hurried_run, tests):
    assert await score(run, ADD, tests) == 1.0
    assert await attack(hurried_run, FORGE, tests) == {}


@sandboxed
@pytest.mark.parametrize("name", CHANGE)
async def test_a_value_is_read_once_and_a_failed_check_is_a_wrong_answer(score, run, name):
    program, test = CHANGE[name]
    assert await score(run, program, {"script": test}) == 0.0


def test_the_corpus_is_a_corpus():
    assert len(STEAL) + len(BREAK) + len(LEAVE) + len(FORGE) >= 60


@sandboxed
@pytest.mark.parametrize("program, tests, expected", HONEST)
async def test_an_honest_verdict(score, run, program, tests, expected):
    assert await score(run, program, tests) == expected


@sandboxed
async def test_tests_may_be_text(score, run):
    assert [await score(run, ADD, json.dumps(tests)) for tests in (CALL, STATEMENTS)] == [1.0, 1.0]


PROSE = "Use ```x``` here.\n\n"
COMPLETIONS = [
    ("```python\nA\n```\ntext\n```python\nB\n```", "B\n"),
    (PROSE + "```py\nA\n```\n```bash\nls\n```\ndone", "A\n"),
    ("```\nA\n```\n```\noutput\n```", "output\n"),
    ("```python\nA\n```\n```\noutput\n```", "A\n"),
    ("  ```Python3\n  A\n  ```", "  A\n"),
    ("```python\ncut off", "cut off"),
    ("```text\nA\n```", None),
    ("A", "A"),
]


@pytest.mark.parametrize("completion, program", COMPLETIONS)
def test_the_program_is_the_last_block_of_python(completion, program):
    assert find_program(completion, require_fence=False) == program
    assert find_program(completion, require_fence=True) == (program if "```" in completion else None)


@sandboxed
@pytest.mark.parametrize(
    "tests",
    ["", "no JSON", "[]", "{}", 5, None, [5], ["assert ("], {"inputs": [], "outputs": []},
     {"inputs": ["1"], "outputs": []}, {"inputs": [1], "outputs": [1]}, {"inputs": [[1]], "outputs": [1]},
     {"inputs": [1], "outputs": [1], "fn_name": "f"},
     {"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, {"inputs": [[]], "outputs": [1], "fn_name": "f("},
     {"script": "("}, {"script": 5}, {"script": "pass", "more": 1}, {"script": "pass", "setup": 5}, "[" * 100_000,
     {"script": "import numpy\nassert add(1, 2) == 3"}, {"script": "def t():\n    from pytest import raises\nt()"},
     {"script": "pass", "setup": "import numpy"}, {**pairs(("", "")), "setup": "("}, ["from solution import add"]],
)  # fmt: skip
async def test_unreadable_tests_are_a_failure_for_right_and_wrong_programs(run, make_item, tests):
    outcomes = await run.score([make_item(program, extra={"tests": tests}) for program in (ADD, "```text\n```")])
    assert [outcome.failure.reason for outcome in outcomes] == [FailureReason.INVALID_ANSWER] * 2


@pytest.mark.parametrize(
    ("tests", "fix"),
    [({"script": "def check(candidate):\n    assert candidate(2, 3) == 5"}, r"append a call such as check\("),
     ({"script": "def run():\n    check()\ndef check():\n    assert add(2, 3) == 5"}, "nothing calls run or check"),
     ({"script": "def test_add(capsys):\n    assert add(2, 3) == 5"}, r"append test_add\(...\) with its capsys"),
     ({"script": "async def test_add():\n    assert add(2, 3) == 5"}, "nothing runs test_add.*call it"),
     ({"script": "class TestAdd:\n    def setup_method(self): pass\n    def test(self): assert f() == 5"},
      "nothing runs setup_method.*call it"),
     ("def check(f): assert f(2) == 5", r'is not JSON .*; code is {"script": CODE} or'),
     ([{"input": "1", "output": "1", "testtype": "functional"}], '"fn_name": NAME'), ([{"input": "1"}], "and output"),
     ({"script": "# to do"}, "write an assert statement"), ({"script": ""}, "write an assert statement"),
     (["assert add(1, 1) == 2", "add(2, 3) == 5"], r"nothing checks `add\(2, 3\) == 5`: write assert before it")],
)  # fmt: skip
def test_a_script_whose_checks_do_not_run_is_refused_with_the_fix(tests, fix):
    with pytest.raises(ScoringError, match=fix) as refusal:
        read_tests(tests, float_tolerance=0.0)
    assert refusal.value.reason is FailureReason.INVALID_ANSWER


@sandboxed
async def test_all_or_nothing_a_fence_and_tests_in_the_answer(open_run, make_item):
    settings = {"kind": "code", "tests_key": None, "require_fence": True, "timeout_s": PATIENCE_S}
    tests = json.dumps(["assert f(1) == 1", "assert f(1) == 2", "assert f(1) == 1"])
    async with open_run(settings) as run:
        programs = ["```python\nf = abs\n```", "```python\nclass f(int): pass\n```", "f = abs"]
        outcomes = await run.score([make_item(program, tests) for program in programs])
        (right,) = await run.score([make_item(programs[0], tests.replace("== 2", "!= 2"))])
    assert [outcome.components for outcome in outcomes] == [{"code": 0.0}] * 3
    assert right.components == {"code": 1.0}


@sandboxed
@pytest.mark.parametrize(
    ("tests", "limit"),
    [(pairs(("x" * 2**25, "1")), "max_disk_mib"), (pairs(("", "x" * 2**19)), "max_output_mib"),
     ({**CALL, "outputs": [[0] * 2**18]}, "max_output_mib"), ([f"assert f() == '{'x' * 2**19}'"], "max_output_mib")],
    ids=["input", "output", "result", "value"],
)  # fmt: skip
async def test_a_test_above_the_limits_is_a_failure_and_not_the_programs(run, make_item, tests, limit):
    (outcome,) = await run.score([make_item(ADD, extra={"tests": tests})])
    assert outcome.failure.reason is FailureReason.INVALID_ANSWER
    assert limit in outcome.failure.detail


@sandboxed
async def test_a_row_without_the_column_says_which(run, make_item):
    (outcome,) = await run.score([make_item(ADD, extra={"test": CALL})])
    assert outcome.failure.reason is FailureReason.INVALID_ANSWER
    assert "no column 'tests'" in outcome.failure.detail


@pytest.fixture
def path_of_programs(monkeypatch) -> Iterator[Path]:
    """Yields a folder that alone is PATH, with only setpriv of what the sandbox needs; other users may read it."""
    setpriv = shutil.which("setpriv")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("PATH", folder)
        if setpriv:
            Path(folder, "setpriv").symlink_to(setpriv)
        yield Path(folder)


@pytest.mark.usefixtures("path_of_programs")
async def test_without_bubblewrap_nothing_opens(open_run):
    with pytest.raises(InvalidInput, match=r"reward\.scorers\.0 \(code\) cannot start: .*apt-get install bubblewrap"):
        async with open_run({"kind": "code"}):
            pass


async def test_a_bubblewrap_that_makes_no_namespaces_is_refused(open_run, path_of_programs):
    bwrap = path_of_programs / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    bwrap.chmod(0o755)
    with pytest.raises(InvalidInput, match=r"No permissions to create new namespace.*must be allowed to make user"):
        async with open_run({"kind": "code"}):
            pass


@sandboxed
async def test_a_sandbox_that_does_not_start_is_a_failure_and_no_score(open_run, make_item, path_of_programs):
    path_of_programs.joinpath("bwrap").symlink_to(BWRAP)
    async with open_run({"kind": "code"}) as run:
        path_of_programs.joinpath("bwrap").unlink()
        (outcome,) = await run.score([make_item(ADD, extra={"tests": CALL})])
    assert (outcome.failure.reason, outcome.components) == (FailureReason.ERROR, {})


@sandboxed
async def test_canceling_and_closing_leave_no_process(open_run, make_item):
    before = _foreign_processes()
    item = make_item("import time; print(5, flush=True); time.sleep(600)", extra={"tests": pairs(("", "5"))})
    async with open_run({"kind": "code", "timeout_s": 600, "max_concurrent": 2}) as run:
        scoring = asyncio.create_task(run.score([item] * 3))
        await until(lambda: _foreign_processes() - before)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        await until(lambda: _foreign_processes() <= before)
        (outcome,) = await run.score([make_item(ADD, extra={"tests": CALL})])
        assert outcome.reward == 1.0
        scoring = asyncio.create_task(run.score([item] * 3))
        await until(lambda: _foreign_processes() - before)  # some run, some wait
    outcomes = await asyncio.wait_for(scoring, timeout=PATIENCE_S)
    assert [outcome.failure.reason for outcome in outcomes] == [FailureReason.CRASHED] * 3
    await until(lambda: _foreign_processes() <= before)


@sandboxed
async def test_a_sandbox_for_which_no_descriptor_is_left_is_ended(open_run, make_item, monkeypatch):
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = _foreign_processes()
    item = make_item("import time; time.sleep(600)", extra={"tests": pairs(("", "5"))})
    async with open_run({"kind": "code", "timeout_s": 600}) as run:
        monkeypatch.setattr(os, "pidfd_open", refuse)
        (outcome,) = await run.score([item])
        await until(lambda: _foreign_processes() <= before)
    assert "bwrap does not start: [Errno 24] Too many open files" in outcome.failure.detail


@sandboxed
async def test_the_version_names_the_interpreter(run):
    assert run.scorer == f"code 7/python-{platform.python_version()} x 1"


async def test_programs_run_where_new_files_are_private(open_run, score) -> None:
    """Tests a sandbox that is made under umask 077.

    New files of a service are private to its owner, but the user `nobody` must be able to read those of the sandbox.
    """
    before = os.umask(0o077)
    try:
        async with open_run({"kind": "code", "timeout_s": PATIENCE_S, **LIMITS}) as opened:
            assert await score(opened, "print(5)", pairs(("", "5"))) == 1.0
    finally:
        os.umask(before)
