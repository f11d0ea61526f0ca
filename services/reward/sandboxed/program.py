"""Serves a program to the process that runs its test: loads it, and runs the operations on its objects that this asks
for.

Nothing in here is trusted, because the program runs in this process and can change all of it. It has no test, no
expected value, and no descriptor but the two pipes to the test's process, which takes from it only data.

    -> {"names": ["add", "V"]}                                      the globals that the test uses
    <- {"value": {"dict": [["add", {"object": [0, ...]}]]}, ...}    those that the program has
    -> {"do": "call", "args": [{"object": 0}, 2, 3], "kwargs": {}}
    <- {"value": 5, "printed": ""}   or   {"error": {"kind": "ValueError", ...}, "printed": ""}
    <- {"callback": 0, "what": "call", "args": [...], "kwargs": {}} on an object of the test, while a call is answered
"""

import copy
import importlib
import io
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from services.reward.sandboxed.wire import OPERATORS, Peer, name_of, pack, pack_error, to_plain, unpack


def _as_container(value: Any) -> object:
    """Returns what an object holds that has a length and can be iterated, in plain containers."""
    len(value)
    return {key: value[key] for key in value.keys()} if hasattr(value, "keys") else list(value)  # noqa: SIM118


_DO: dict[str, Callable] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    **{read.__name__: read for read in (getattr, setattr, delattr, isinstance, bool, len, iter, next, str, repr, hash)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "plain": to_plain,
    "items": _as_container,
    "enter": lambda context: type(context).__enter__(context),
    "exit": lambda context, *error: type(context).__exit__(context, *error),
}
"""Operations that a test can run on an object; all others are functions of the module operator."""
_CONTAINERS = (list, dict, set, bytearray)


class Program:
    """The program's objects that the test's process knows, by their numbers."""

    def __init__(self, peer: Peer, printed: io.StringIO):
        self._peer, self._printed = peer, printed
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}
        self._stubs: dict[int, _Stub] = {}

    def serve(self, module: ModuleType) -> None:
        while True:
            self._peer.send(self._answer(module, self._peer.receive()))

    def _answer(self, module: ModuleType, message: dict) -> dict:
        try:
            if "names" in message:
                named = {name: vars(module)[name] for name in message["names"] if name in vars(module)}
                answer: dict[str, object] = {"value": pack(named, self._reference)}
            else:
                answer = self._perform(message)
        except BaseException as error:  # noqa: BLE001 the test may expect any exception
            answer = {"error": self._pack_error(error)}
        answer["printed"] = self._printed.getvalue()
        self._printed.seek(0)
        self._printed.truncate()
        return answer

    def _perform(self, message: dict) -> dict:
        args = [unpack(value, self._resolve) for value in message["args"]]
        kwargs = {name: unpack(value, self._resolve) for name, value in message["kwargs"].items()}
        result = (_DO.get(message["do"]) or getattr(operator, message["do"]))(*args, **kwargs)
        answer = {"value": pack(result, self._reference)}
        if result is None and any(type(value) in _CONTAINERS for value in args):
            answer["args"] = [pack(value, self._reference) for value in args]
        return answer

    def _reference(self, value: object) -> dict:
        if isinstance(value, ModuleType):
            return {"module": value.__name__}
        if isinstance(value, _Stub):
            return {"callback": vars(value)["__number__"]}
        number = self._number(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [base for base in value.__bases__ if issubclass(base, BaseException)]
            return {"exception": [number, value.__name__, [name_of(base) or self._reference(base) for base in bases]]}
        if isinstance(value, BaseException):
            return {"error": self._pack_error(value)}
        try:
            return {"value": [number, pack(to_plain(value, int, float, complex, str, bytes), self._reference)]}
        except TypeError:
            return {"object": number}

    def _pack_error(self, error: BaseException) -> dict:
        if "__test_error__" in vars(error):
            return {"mine": vars(error)["__test_error__"]}
        return {**pack_error(error, self._reference), "number": self._number(error)}

    def _number(self, value: object) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return number

    def _resolve(self, reference: dict) -> object:
        ((kind, content),) = reference.items()
        match kind:
            case "object":
                return self._objects[content]
            case "builtin":
                return vars(sys.modules["builtins"])[content]
            case "module":
                return importlib.import_module(content)
            case "error":
                return self._to_error(content)
        if content not in self._stubs:
            self._stubs[content] = _Callback(self, content) if kind == "callback" else _Stub(self, content)
        return self._stubs[content]

    def _to_error(self, content: dict) -> BaseException:
        """Returns an exception of the test, as one of the same built-in class or of the program's class."""
        kind = None if isinstance(content["kind"], str) else self._resolve(content["kind"])
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = vars(sys.modules["builtins"])[content["builtin"]]
        error = kind.__new__(kind)
        error.args = tuple(unpack(content["args"], self._resolve))  # pyright: ignore[reportArgumentType]
        if "mine" in content:
            vars(error)["__test_error__"] = content["mine"]
        return error

    def call_back(self, what: str, number: int, args: tuple, kwargs: dict) -> object:
        packed = {name: pack(value, self._reference) for name, value in kwargs.items()}
        message = {"callback": number, "what": what, "args": [pack(value, self._reference) for value in args]}
        self._peer.send({**message, "kwargs": packed})
        while "do" in (message := self._peer.receive()):  # that function calls the program in turn
            self._peer.send(self._answer(ModuleType(""), message))
        if "error" in message:
            raise self._resolve(message["error"])  # pyright: ignore[reportGeneralTypeIssues] it is an exception
        return unpack(message["value"], self._resolve)


class _Stub:
    """Stands for an object of the test."""

    def __init__(self, program: Program, number: int):
        vars(self).update(__program__=program, __number__=number)

    def __getattr__(self, name: str) -> object:
        return _on_test(self, "getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        _on_test(self, "setattr", name, value)


class _Callback(_Stub):
    """Stands for a function or class of the test, or another object that can be called."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _on_test(self, "call", *args, **kwargs)


def _on_test(stub: _Stub, what: str, *args: object, **kwargs: object) -> Any:
    return vars(stub)["__program__"].call_back(what, vars(stub)["__number__"], args, kwargs)


for _what in ("len", "iter", "next", "bool", "str", "repr", "hash", "enter", "exit", *OPERATORS):
    setattr(_Stub, f"__{_what}__", lambda self, *args, _name=_what: _on_test(self, _name, *args))


def serve(load: Callable[[], ModuleType], peer: Peer) -> None:
    """Loads the program and serves it. What it prints is sent along, because a test may read it."""
    sys.stdout = printed = io.StringIO()
    Program(peer, printed).serve(load())
