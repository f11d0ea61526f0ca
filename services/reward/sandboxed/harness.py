"""Runs one program inside the sandbox, with each test in a process of its own.

    main(job, tests)
    job: descriptor of JSON {"program", "setup", "test_sizes", "scripts", "timeout_s", "max_output_bytes", "rlimits"}
    tests: descriptor of concatenated JSON; each process reads only its own, so none sees another's test
    -> {}                                    ready: the program has not run yet
    -> {"output": "..."} or {"output": null} one line per test; null unless the test exited by itself with status 0

Kinds of tests: `stdin` {"input"} outputs what the program prints; `call` {"function", "args"} outputs the result as
JSON; `value` {"expression"} outputs the result as `encode` writes it; `script` {"code", "names", "modules"} outputs
`passed` if the code ran to its end (see checker.py).

The program of a `stdin`, `call` or `value` test runs in the process that writes the output. A script runs in a process
of its own, which alone can write the output, and exchanges data with that of the program over pipes (see wire.py;
docs/security.md says why). Files that a test leaves in /tmp are removed before the next test.

This module imports only its neighbors and the standard library, because the sandbox has nothing else. Importing json
takes several milliseconds, but it also imports re, collections and functools, which most programs need and which every
fork then has at no cost.
"""

import builtins
import functools
import gc
import json
import os
import resource
import select
import signal
import sys
import time
from _sitebuiltins import Quitter
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from services.reward.sandboxed.wire import to_plain, unpack, write_line

_FRAMES = 50  # on the stack below a program, at most, which it can use in addition
SourceFileLoader = type(json.__loader__)


class _Text(SourceFileLoader):
    """Loads a module from source in memory."""

    def __init__(self, name: str, source: str):
        super().__init__(name, "program.py")
        self._source = source.encode()

    def get_data(self, path: str) -> bytes:
        return self._source


def encode(value: object) -> object:
    """Encodes plain data as JSON that keeps its type; equal values have equal encodings. Others raise TypeError."""
    if value is None:
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, int | float | complex) or kind in ("fractions.Fraction", "decimal.Decimal"):
        return _encode_number(value)
    if isinstance(value, list):
        return [encode(entry) for entry in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(entry) for entry in value]}
    if isinstance(value, set | frozenset | type({}.keys()) | type({}.items())):
        return {"set": sorted((encode(entry) for entry in value), key=json.dumps)}
    if isinstance(value, dict):
        return {"dict": sorted(([encode(key), encode(entry)] for key, entry in value.items()), key=json.dumps)}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    return to_plain(value, str)


def _encode_number(value: Any) -> object:
    """Returns an int if the value equals one (also True and 1.0), else a float if it equals one."""
    if isinstance(value, int | float | complex):
        value = to_plain(value, int, float, complex)
    if isinstance(value, complex):
        if value.imag:
            return {"complex": [value.real, value.imag]}
        value = value.real
    if isinstance(value, float) and not value.is_integer():
        return value
    whole = int(value)
    if whole == value:
        return whole if whole.bit_length() < 10_000 else {"int": hex(whole)}
    return float(value) if float(value) == value else {"number": str(value)}


def main(job_descriptor: int, tests: int) -> None:
    """Runs all tests. It returns only in the fork of a `stdin` test, after the program has finished."""
    with os.fdopen(job_descriptor) as file:
        job = json.load(file)
    if any(job["scripts"]):  # imported only for them, but before the forks
        from services.reward.sandboxed import checker, program  # noqa: F401
    # Many programs end with these, which the interpreter lacks without the module site.
    for name in ("exit", "quit"):
        setattr(builtins, name, Quitter(name, ""))
    sys.set_int_max_str_digits(0)  # a program may print integers of any length
    sys.setrecursionlimit(sys.getrecursionlimit() + _FRAMES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the only signal that programs in here could send to process 1
    gc.freeze()  # keeps the garbage collector of a fork from copying the pages that it shares with this process
    write_line(1, {})
    offset = 0
    for size, is_script in zip(job["test_sizes"], job["scripts"], strict=True):
        _empty("/tmp")  # if this fails, all further tests fail
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            if is_script:
                _script(job, tests, size, offset, write_end)
            test = _read(tests, size, offset)
            _limit(job)
            _redirect(test, write_end)
            _KINDS[test["kind"]](job, test, write_end)
            return
        offset += size
        os.close(write_end)
        write_line(1, {"output": _output(child, read_end, job)})
        os.close(read_end)
    os._exit(0)


def _read(tests: int, size: int, offset: int) -> dict:
    test = json.loads(os.pread(tests, size, offset))
    os.close(tests)
    return test


def _limit(job: dict) -> None:
    for name, limit in job["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))


def _empty(folder: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _empty(entry.path)
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)


def _output(child: int, read_end: int, job: dict) -> str | None:
    """Returns the child's output until it ends, and kills everything that it started."""
    deadline, ended, output = time.monotonic() + job["timeout_s"], False, bytearray()
    pidfd, poll = os.pidfd_open(child), select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(read_end, select.POLLIN)
    while not ended and len(output) <= job["max_output_bytes"] and time.monotonic() < deadline:
        for descriptor, _ in poll.poll(max(0, deadline - time.monotonic()) * 1000):
            if descriptor == pidfd:
                ended = True
            elif chunk := os.read(read_end, 65536):
                output += chunk
            else:
                poll.unregister(read_end)
    os.close(pidfd)
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # everything in this process namespace except this process, which is process 1
    succeeded = _wait_for_all()[child] == 0
    # Every writer is dead, so this loop ends.
    while len(output) <= job["max_output_bytes"] and (chunk := os.read(read_end, 65536)):
        output += chunk
    if not (ended and succeeded) or len(output) > job["max_output_bytes"]:
        return None
    return output.decode(errors="replace")


def _wait_for_all() -> dict[int, int]:
    """Waits for all children, which are dead or dying, and returns their statuses. Process 1 adopts orphans."""
    statuses = {}
    with suppress(ChildProcessError):
        while True:
            pid, statuses[pid] = os.wait()
    return statuses


def _redirect(test: dict, write_end: int) -> None:
    """Sets the standard streams of a program: its input, and the pipe if its output is the answer; else /dev/null."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    if test["kind"] != "stdin":
        os.dup2(null, 0)
        os.dup2(null, 1)
        return
    os.dup2(write_end, 1)
    os.close(write_end)
    with os.fdopen(os.open("/tmp", os.O_TMPFILE | os.O_RDWR), "wb") as file:
        file.write(test["input"].encode())
        file.flush()
        file.seek(0)
        os.dup2(file.fileno(), 0)


def _load(module: ModuleType, *sources: str) -> None:
    for source in sources:
        _Text(module.__name__, source).exec_module(module)


def _import_program(job: dict, name: str = "program") -> ModuleType:
    sys.argv[:] = ["program.py"]
    sys.modules[name] = module = ModuleType(name)
    module.__file__ = "/tmp/program.py"
    _load(module, job["setup"], job["program"])
    return module


def _stdin(job: dict, test: dict, write_end: int) -> None:
    """Runs the program like `python program.py`; exceptions and exits propagate to the interpreter."""
    _import_program(job, "__main__")


def _call(job: dict, test: dict, write_end: int) -> None:
    module, name = _import_program(job), test["function"]
    is_method = hasattr(module, "Solution") and (hasattr(module.Solution, name) or not hasattr(module, name))
    args: Any = unpack(test["args"], dict)
    result = getattr(module.Solution() if is_method else module, name)(*args)
    _answer(write_end, json.dumps(result))


def _value(job: dict, test: dict, write_end: int) -> None:
    module = _import_program(job)
    _load(module, f"__value__ = (\n{test['expression']}\n)")
    _answer(write_end, json.dumps(encode(module.__value__)))


def _script(job: dict, tests: int, size: int, offset: int, write_end: int) -> NoReturn:
    """Runs the program in a fork, which is made before the test is read, and the test in this process."""
    from services.reward.sandboxed import checker, program
    from services.reward.sandboxed.wire import Peer

    requests_end, request_end = os.pipe()
    replies_end, reply_end = os.pipe()
    _limit(job)
    if os.fork() == 0:
        _redirect({"kind": "script"}, write_end)
        # The program gets its ends of the two pipes and no other descriptor: not the test, nor the pipe for the answer.
        ends = sorted((requests_end, reply_end))
        for low, high in zip((3, *(end + 1 for end in ends)), (*ends, job["rlimits"]["RLIMIT_NOFILE"]), strict=True):
            os.closerange(low, high)
        program.serve(lambda: _import_program(job), Peer(requests_end, reply_end))
    os.close(requests_end)
    os.close(reply_end)
    test = _read(tests, size, offset)
    _redirect(test, write_end)
    sys.argv[:] = ["tests.py"]
    try:
        answer = functools.partial(_answer, write_end)
        checker.check(test, job["setup"], _load, Peer(replies_end, request_end), answer)
    finally:
        os._exit(1)


def _answer(write_end: int, text: str) -> NoReturn:
    """Writes the answer and ends the process at once, without running the program's exit handlers."""
    with os.fdopen(write_end, "wb") as file:
        file.write(text.encode())
    os._exit(0)


_KINDS = {"stdin": _stdin, "call": _call, "value": _value}
