"""Serves a program to the process that runs its test: loads it, and runs the operations on its objects that this asks
for.

Nothing in here is trusted, because the program runs in this process and can change all of it. It has no test, no
expected value, and no descriptor but the two pipes to the test's process, which takes from it only data.

    -> {"names": ["add", "V"]}                                      the globals that the test uses
    <- {"value": {"dict": [["add", {"object": [0, ...]}]]}, ...}    those that the program has
    -> {"do": "call", "args": [{"object": 0}, 2, 3], "kwargs": {}}
    <- {"value": 5, "printed": ""}   or   {"error": {"kind": "ValueError", ...}, "printed": ""}
    <- {"callback": 0, "args": [...]}                               a function of the test, while a call is answered
"""

import copy
import io
import operator
import sys
from collections.abc import Callable
from types import ModuleType

from services.reward.inside.wire import Peer, pack, pack_error, to_plain, unpack

_DO: dict[str, Callable] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "isinstance": isinstance,
    "bool": bool,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "hash": hash,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "plain": to_plain,
    "enter": lambda context: type(context).__enter__(context),
    "exit": lambda context, *error: type(context).__exit__(context, *error),
}
"""Operations that a test can run on an object; all others are functions of the module operator."""
_CONTAINERS = (list, dict, set, bytearray)


class Program:
    """Holds the program's objects that the test's process knows, by their numbers."""

    def __init__(self, peer: Peer, printed: io.StringIO):
        self._peer, self._printed = peer, printed
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}

    def serve(self, module: ModuleType) -> None:
        """Answers until the other process closes the pipe."""
        while True:
            self._peer.send(self._answer(module, self._peer.receive()))

    def _answer(self, module: ModuleType, message: dict) -> dict:
        try:
            if "names" in message:
                found = {name: vars(module)[name] for name in message["names"] if name in vars(module)}
                answer: dict[str, object] = {"value": pack(found, self._refer)}
            else:
                answer = self._do(message)
        except BaseException as error:  # noqa: BLE001 the test may expect any exception
            answer = {"error": pack_error(error, self._refer)}
        answer["printed"] = self._printed.getvalue()
        self._printed.seek(0)
        self._printed.truncate()
        return answer

    def _do(self, message: dict) -> dict:
        args = [unpack(value, self._resolve) for value in message["args"]]
        kwargs = {name: unpack(value, self._resolve) for name, value in message["kwargs"].items()}
        result = (_DO.get(message["do"]) or getattr(operator, message["do"]))(*args, **kwargs)
        answer = {"value": pack(result, self._refer)}
        if result is None and any(type(value) in _CONTAINERS for value in args):
            answer["args"] = [pack(value, self._refer) for value in args]
        return answer

    def _refer(self, value: object) -> dict:
        if isinstance(value, ModuleType):
            return {"module": value.__name__}
        if isinstance(value, _Callback):
            return {"callback": value.number}
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            builtin = next(base.__name__ for base in value.__mro__ if base.__module__ == "builtins")
            return {"exception": [number, value.__name__, builtin]}
        return {"object": number}

    def _resolve(self, reference: dict) -> object:
        ((kind, content),) = reference.items()
        if kind == "object":
            return self._objects[content]
        if kind == "builtin":
            return vars(sys.modules["builtins"])[content]
        return _Callback(self, content)

    def call_back(self, number: int, args: tuple, kwargs: dict) -> object:
        """Calls a function of the test."""
        packed = {name: pack(value, self._refer) for name, value in kwargs.items()}
        self._peer.send({"callback": number, "args": [pack(value, self._refer) for value in args], "kwargs": packed})
        while "do" in (message := self._peer.receive()):  # that function calls the program in turn
            self._peer.send(self._answer(ModuleType(""), message))
        if "error" in message:
            raise vars(sys.modules["builtins"])[message["error"]["builtin"]](*message["error"]["args"])
        return unpack(message["value"], self._resolve)


class _Callback:
    """Stands for a function of the test."""

    def __init__(self, program: Program, number: int):
        self._program, self.number = program, number

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._program.call_back(self.number, args, kwargs)


def serve(load: Callable[[], ModuleType], peer: Peer) -> None:
    """Loads the program and serves it. What it prints is sent along, because a test may read it."""
    sys.stdout = printed = io.StringIO()
    Program(peer, printed).serve(load())
