"""Runs one program inside the sandbox, with each test in a fork of its own.

    argv[1]: descriptor of the job, JSON {"program", "setup", "test_sizes", "timeout_s", "max_output_bytes", "rlimits"}
    argv[2]: descriptor of the tests, concatenated JSON; each fork reads only its own, so no process sees another's test
    -> {}                                    ready: the program has not run yet
    -> {"output": "..."} or {"output": null} one line per test; null unless the test exited by itself with status 0

Kinds of tests: `stdin` {"input"} outputs what the program prints; `call` {"function", "args"} outputs the result as
JSON; `value` {"expression"} outputs the result as `encode` writes it; `script` {"code", "nonce"} outputs the nonce if
the code ran to its end.

Nothing in here is trusted: the scorer compares the output outside, with values that never enter the sandbox. Scripts
are the exception, because their expected values are part of their code. Program and script therefore run in a
subinterpreter whose frames, modules and garbage collector cannot reach the nonce. Files that a test leaves in /tmp are
removed before the next test.

This module imports only the standard library, because the sandbox has nothing else. Importing json takes several
milliseconds, but it also imports re, collections and functools, which most programs need and which every fork then has
at no cost.
"""

import gc
import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from types import ModuleType

SourceFileLoader = type(json.__loader__)

# _SAVE runs before the program, _RESTORE between program and script: it undoes the program's patches of what most
# scripts depend on.
_SAVE = """
import builtins, sys
del sys.settrace, sys.setprofile  # a trace function can jump over the rest of a caller's lines
__name__, __saved__ = "program", (dict(vars(builtins)), sys.path[:], sys.path_hooks[:], sys.meta_path[:])
sys.modules[__name__] = sys.modules["__main__"]
"""
_RESTORE = """
import builtins, sys
vars(builtins).update(__saved__[0])
sys.path[:], sys.path_hooks[:], sys.meta_path[:] = __saved__[1:]
for name in [name for name in sys.modules if name.partition(".")[0] in ("unittest", "math")]:
    del sys.modules[name]
__name__ = "tests"
sys.modules[__name__] = sys.modules["__main__"]
"""
_RUN_TEST_CASES = """
import sys
if "unittest" in sys.modules:
    import io, unittest
    suite = unittest.TestLoader().loadTestsFromModule(sys.modules["__main__"])
    if not unittest.TextTestRunner(io.StringIO()).run(suite).wasSuccessful():
        raise AssertionError("a test case failed")
"""


class _Text(SourceFileLoader):
    """Loads a module from source in memory."""

    def __init__(self, name: str, source: str):
        super().__init__(name, "program.py")
        self._source = source.encode()

    def get_data(self, path: str) -> bytes:
        return self._source


def encode(value: object) -> object:
    """Encodes `value` as JSON that keeps its type; equal values have equal encodings.

    Raises:
        TypeError: The value contains objects that are not of plain types.
    """
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if value is None:
        return value
    if isinstance(value, list):
        return [encode(entry) for entry in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(entry) for entry in value]}
    if isinstance(value, set | frozenset):
        return {"set": sorted((encode(entry) for entry in value), key=json.dumps)}
    if isinstance(value, dict):
        return {"dict": sorted(([encode(key), encode(entry)] for key, entry in value.items()), key=json.dumps)}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    raise TypeError(f"a {type(value).__name__} is not plain data")


def main() -> None:
    """Runs all tests. It returns only in the fork of a `stdin` test, after the program has finished."""
    job_descriptor, tests = map(int, sys.argv[1:])
    with os.fdopen(job_descriptor) as file:
        job = json.load(file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the only signal that programs in here could send to process 1
    gc.freeze()  # keeps the garbage collector of a fork from copying the pages that it shares with this process
    _reply({})
    offset = 0
    for size in job["test_sizes"]:
        _empty("/tmp")  # if this fails, all further tests fail
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            test = json.loads(os.pread(tests, size, offset))
            os.close(tests)
            for name, limit in job["rlimits"].items():
                resource.setrlimit(getattr(resource, name), (limit, limit))
            _redirect(test, write_end)
            _KINDS[test["kind"]](job, test, write_end)
            return
        offset += size
        os.close(write_end)
        _reply({"output": _output(child, read_end, job)})
        os.close(read_end)
    os._exit(0)


def _empty(folder: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _empty(entry.path)
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)


def _reply(message: dict) -> None:
    line = memoryview(json.dumps(message).encode() + b"\n")
    while line:
        line = line[os.write(1, line) :]


def _output(child: int, read_end: int, job: dict) -> str | None:
    """Returns what the child writes until it ends, and kills everything that it started."""
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


def _stdin(job: dict, test: dict, write_end: int) -> None:
    """Runs the program like `python program.py`; exceptions and exits propagate to the interpreter."""
    sys.argv[:] = ["program.py"]
    sys.modules["__main__"] = module = ModuleType("__main__")
    _load(module, job["setup"], job["program"])


def _import_program(job: dict) -> ModuleType:
    sys.argv[:] = ["program.py"]
    sys.modules["program"] = module = ModuleType("program")
    _load(module, job["setup"], job["program"])
    return module


def _call(job: dict, test: dict, write_end: int) -> None:
    module = _import_program(job)
    owner = module.Solution() if hasattr(module, "Solution") else module
    result = getattr(owner, test["function"])(*test["args"])
    _answer(write_end, json.dumps(result))


def _value(job: dict, test: dict, write_end: int) -> None:
    module = _import_program(job)
    _load(module, f"__value__ = (\n{test['expression']}\n)")
    _answer(write_end, json.dumps(encode(module.__value__)))


def _script(job: dict, test: dict, write_end: int) -> None:
    import _xxsubinterpreters as interpreters

    interpreter = interpreters.create()
    for source in (_SAVE, job["setup"], job["program"], _RESTORE, test["code"], _RUN_TEST_CASES):
        interpreters.run_string(interpreter, source)  # raises if the source does
    _answer(write_end, test["nonce"])


def _answer(write_end: int, text: str) -> None:
    """Writes the answer and ends the process at once, without running the program's exit handlers."""
    with os.fdopen(write_end, "wb") as file:
        file.write(text.encode())
    os._exit(0)


_KINDS = {"stdin": _stdin, "call": _call, "value": _value, "script": _script}

if __name__ == "__main__":
    main()
