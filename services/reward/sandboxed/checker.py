"""Runs a test of kind `script` in a process that never loads the program, and has proxies in place of its objects.

What a proxy's method returns comes from the program's process as data (see wire.py and proxies.py). The other way
round, plain data is copied, and any other object of the test is a stub in the program's process, whose operations come
back here as callbacks.

A check of the test that fails is a wrong answer wherever it stands (docs/security.md).
"""

import builtins
import importlib
import io
import json
import operator
import os
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from services.reward.sandboxed.proxies import Proxy, lines_of, number_of, set_under_test, value_of
from services.reward.sandboxed.wire import OPERATORS, Peer, pack, pack_error, unpack

PASSED = "passed"
_RUN_TEST_CASES = """
import sys
if "unittest" in sys.modules:
    import io, unittest
    suite = unittest.TestLoader().loadTestsFromModule(sys.modules["__main__"])
    if not unittest.TextTestRunner(io.StringIO()).run(suite).wasSuccessful():
        raise AssertionError("a test case failed")
"""


def check(test: dict, setup: str, load: Callable[..., None], peer: Peer, answer: Callable[[str], NoReturn]) -> None:
    """Runs the test's code and answers that it passed. Any exception, and a program that ends, fail the test."""
    sys.modules["__main__"] = module = ModuleType("__main__")
    if "unittest" in setup + test["code"]:
        _keep_main_from_exiting()
    load(module, setup)
    remote = Remote(peer, test["code"], vars(module))
    names = [name for name in test["names"] if name not in vars(module)]
    # The program must not replace a module that the test uses but does not import.
    modules = {name: importlib.import_module(name) for name in test["modules"] if name in names}
    vars(module).update(remote.names([name for name in names if name not in modules]) | modules)
    load(module, test["code"], _RUN_TEST_CASES)
    answer(PASSED)


def _keep_main_from_exiting() -> None:
    """Lets `unittest.main()` leave the test cases to the end of the script, where they are run anyway."""
    import unittest

    original = unittest.main

    def main(*args: Any, exit: bool = True, **kwargs: Any) -> object:
        return None if exit else original(*args, exit=False, **kwargs)

    unittest.main = main  # pyright: ignore[reportAttributeAccessIssue]


class Remote:
    """Asks the program's process."""

    def __init__(self, peer: Peer, code: str, variables: dict[str, object]):
        self._peer, self._code, self._variables = peer, code, variables
        self._objects: dict[int, object] = {}
        self._exceptions: dict[int, type[BaseException]] = {}
        self._mine: list[object] = []
        self._mine_by_id: dict[int, int] = {}
        self._replies: dict[str, dict] = {}
        self._failed: BaseException | None = None

    def names(self, names: list[str]) -> dict:
        """Returns the program's globals of these names, without those that it does not have."""
        program_globals: dict = self._result(self._ask({"names": names}))  # pyright: ignore[reportAssignmentType]
        for name, value in program_globals.items():
            if name[:1].isupper():
                set_under_test(value)
        return program_globals

    def do(self, what: str, *args: object, is_made: bool = False, **kwargs: object) -> object:
        """Runs the named operation on objects in the other process. Raises the exception that is raised there.

        An operation that reads an object of the program has the same result until one that may change objects.
        `is_made` says that the test makes the result by calling a class under test.
        """
        packed = {name: pack(value, self._reference) for name, value in kwargs.items()}
        message = {"do": what, "args": [pack(value, self._reference) for value in args], "kwargs": packed}
        key = json.dumps(message) if what in _READS else ""
        reply = self._replies.get(key) or self._ask(message)
        if key:
            self._replies[key] = reply
        if what in _CHANGES:
            self._replies.clear()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        if "error" in reply:
            raise self._to_error(reply["error"], may_stop=what == "next")
        for mine, theirs in zip(args, reply.get("args", ()), strict=False):
            _update(mine, unpack(theirs, self._resolve))
        return self._result(reply, is_made=is_made)

    def is_check(self, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Returns whether `error` is a check of the test that fails, or would skip one that follows in its `with`."""
        if error is None:
            return False
        from services.reward.sandboxed.scripts import skips_check

        with_line = sys._getframe(2).f_lineno
        return self._is_failed_check(error) or skips_check(self._code, with_line, lines_of(trace, self._variables)[:1])

    def _is_failed_check(self, error: BaseException) -> bool:
        from services.reward.sandboxed.scripts import is_in_check

        lines = lines_of(error.__traceback__, self._variables)
        return isinstance(error, AssertionError) and any(is_in_check(self._code, line) for line in lines)

    def _ask(self, message: dict) -> dict:
        try:
            self._peer.send(message)
            while "callback" in (reply := self._peer.receive()):
                self._peer.send(self._call_back(reply))
            sys.stdout.write(str(reply["printed"]))
        except Exception:  # noqa: BLE001 the program has ended or broken the protocol; the test must not survive that
            os._exit(1)
        return reply

    def _result(self, reply: dict, *, is_made: bool = False) -> object:
        try:
            message = reply["value"]
            if is_made and isinstance(message, dict) and message.keys() & {"object", "value"}:
                return self._resolve(message, is_made=True)
            return unpack(message, self._resolve)
        except Exception:  # noqa: BLE001 as above
            os._exit(1)

    def _call_back(self, message: dict) -> dict:
        """Runs an operation on an object of the test, which must be one that the program was given."""
        operation = _ON_MINE[message["what"]]
        mine = self._mine[message["callback"]]
        args = [unpack(value, self._resolve) for value in message["args"]]
        kwargs = {name: unpack(value, self._resolve) for name, value in message["kwargs"].items()}
        try:
            return {"value": pack(operation(mine, *args, **kwargs), self._reference)}
        except Exception as error:  # noqa: BLE001 the program gets what its callback raises
            if self._is_failed_check(error):
                self._failed = error
            return {"error": self._reference(error)}

    def _reference(self, value: object) -> dict:
        number = number_of(value)
        if number is None and isinstance(value, type | BaseException):
            number = vars(value).get("__number__")
        if number is not None:
            return {"object": number}
        if isinstance(value, ModuleType) and value.__name__ in sys.stdlib_module_names:
            return {"module": value.__name__}
        name = getattr(value, "__name__", "")
        if isinstance(value, type | type(len)) and vars(builtins).get(name) is value:
            return {"builtin": name}
        mine = self._mine_by_id.setdefault(id(value), len(self._mine))
        if mine == len(self._mine):
            self._mine.append(value)  # which also keeps it alive, so that no other object gets its id
        if isinstance(value, BaseException):
            return {"error": {**pack_error(value, self._reference), "mine": mine}}
        return {"callback" if callable(value) else "stub": mine}

    def _resolve(self, reference: dict, *, is_made: bool = False) -> object:
        ((kind, content),) = reference.items()
        if kind in ("object", "value"):
            number, plain = content if kind == "value" else (content, None)
            if int(number) not in self._objects:
                is_value = kind == "value" and not is_made
                new = value_of(self, number, unpack(plain, self._resolve)) if is_value else None
                self._objects[int(number)] = Proxy(self, int(number), is_made=is_made) if new is None else new
            return self._objects[int(number)]
        if kind in ("callback", "stub"):
            return self._mine[content]
        if kind == "module" and content.partition(".")[0] in sys.stdlib_module_names:
            return importlib.import_module(content)
        if kind == "error":
            return self._to_error(content, may_stop=True)
        if kind != "exception":
            raise ValueError(f"{kind} is not passed")
        return self._exception_type(*content)

    def _exception_type(self, number: int, name: str, bases: list) -> type[BaseException]:
        """Returns a class that stands for an exception of the program. `bases` are names of Python's or references."""
        if number not in self._exceptions:
            kinds = tuple(_exception(base) if isinstance(base, str) else self._resolve(base) for base in bases)
            content: dict = {"__number__": number, "__module__": "program"}
            content["__getattr__"] = lambda error, attribute: self._ask_error("getattr", error, attribute)
            content["__str__"] = lambda error: self._ask_error("str", error)
            self._exceptions[number] = type(str(name), kinds, content)  # pyright: ignore[reportArgumentType]
        return self._exceptions[number]

    def _ask_error(self, what: str, error: BaseException, *names: str) -> object:
        """Asks an exception that the program raised. One of its classes that the test made has only its arguments."""
        if "__number__" in vars(error) and not any(name.startswith("__") for name in names):
            return self.do(what, error, *names)
        if names:
            raise AttributeError(names[0])
        return BaseException.__str__(error)

    def _to_error(self, content: dict, *, may_stop: bool) -> BaseException:
        """Returns the exception to raise. StopIteration would end a loop of the test early, as in `all(map(f,
        inputs))`."""
        if "mine" in content:
            return self._mine[content["mine"]]  # pyright: ignore[reportReturnType] `raise` refuses all but exceptions
        try:
            kind = content["kind"]
            error_type = _exception(kind) if isinstance(kind, str) else self._resolve(kind)
            assert isinstance(error_type, type) and issubclass(error_type, BaseException)
            if issubclass(error_type, StopIteration | StopAsyncIteration | GeneratorExit) and not may_stop:
                error_type = RuntimeError
            error = error_type.__new__(error_type)
            error.args = tuple(unpack(content["args"], self._resolve))  # pyright: ignore[reportArgumentType]
            vars(error)["__number__"] = int(content["number"])
            return error
        except Exception as error:  # noqa: BLE001 not an exception that can be made here
            return RuntimeError(f"the program raised an exception that cannot be passed: {error}")


def _exception(name: str) -> type[BaseException]:
    """Returns the exception of Python's of this name, such as `ValueError` or `json.decoder.JSONDecodeError`."""
    module, _, kind = name.rpartition(".")
    if module and module.partition(".")[0] not in sys.stdlib_module_names:
        raise ValueError(f"{name} is not passed")
    error_type = getattr(importlib.import_module(module or "builtins"), kind)
    if not (isinstance(error_type, type) and issubclass(error_type, BaseException)):
        raise TypeError(f"{name} is not an exception")
    if any(base.__module__.partition(".")[0] == "unittest" for base in error_type.__mro__):
        raise ValueError(f"{name} is not passed, because a test case that it ends has not failed")
    return error_type


def _update(mine: Any, theirs: Any) -> object:
    """Returns `theirs`; if both are the same kind of container, it is `mine` with the new content."""
    if type(mine) is not type(theirs):
        return theirs
    if isinstance(mine, list):
        mine[:] = [_update(*pair) for pair in zip(mine, theirs, strict=False)] + theirs[len(mine) :]
    elif isinstance(mine, dict):
        content = {key: _update(mine.get(key), value) for key, value in theirs.items()}
        mine.clear()
        mine.update(content)
    elif isinstance(mine, set):
        mine.clear()
        mine.update(theirs)
    elif isinstance(mine, bytearray):
        mine[:] = theirs
    else:
        return theirs
    return mine


def _get_public(mine: object, name: str) -> object:
    """Returns an attribute of a class of the test, of an instance of one, or of a file.

    Private names, and attributes of functions, frames and generators, lead to all that the test knows.
    """
    owner = mine if isinstance(mine, type) else type(mine)
    if name.startswith("_") or not (owner.__module__ == "__main__" or issubclass(owner, io.IOBase)):
        raise AttributeError(f"{type(mine).__name__} object has no attribute {name!r} that the program may use")
    return getattr(mine, name)


def _set_public(mine: object, name: str, value: object) -> None:
    if name.startswith("_") or type(mine).__module__ != "__main__":
        raise AttributeError(f"{type(mine).__name__} object has no attribute {name!r} that the program may set")
    setattr(mine, name, value)


_CHANGES = ("call", "setattr", "delattr", "setitem", "delitem", "next", "enter", "exit")
_READS = ("plain", "items", "getattr", "getitem", "len", "str", "repr", "hash", "bool", *OPERATORS[:6])
_ON_MINE: dict[str, Callable] = {
    "call": lambda mine, *args, **kwargs: mine(*args, **kwargs),
    "getattr": _get_public,
    "setattr": _set_public,
    **{kind.__name__: kind for kind in (len, iter, next, bool, str, repr, hash)},
    "enter": lambda mine: type(mine).__enter__(mine),
    "exit": lambda mine, *error: type(mine).__exit__(mine, *error),
    **{name: getattr(operator, name) for name in OPERATORS},
}
"""Operations that the program can run on an object of the test that it was given."""
