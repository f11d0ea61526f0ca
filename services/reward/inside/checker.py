"""Runs a test of kind `script` in a process that never loads the program, and has proxies in place of its objects.

What a proxy's method returns comes from the program's process as data (see wire.py). An operator of an object of the
program could see the value that is expected and pretend to match it. Therefore:

- An object is compared with data of the test only by its own plain value, if its class derives from a plain type. The
  value is fetched and compared here. An object without one equals no data, and is neither less nor greater.
- What an operator between an object and data returns must be an object too, which then has neither a plain value nor a
  truth value: `abs(f(1) - 0.5) < 1e-6` cannot be answered by the class of `f(1)`.
"""

import builtins
import importlib
import operator
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NoReturn

from services.reward.inside.wire import Peer, pack, pack_error, unpack

PASSED = "passed"
CANNOT_PASS = "cannot pass "
"""Start of the output of a test that passes the program an object that is not plain data."""
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
    module = ModuleType("tests")
    sys.modules["tests"] = sys.modules["__main__"] = module
    load(module, setup)
    remote = Remote(peer, answer)
    names = [name for name in test["names"] if name not in vars(module)]
    # The program must not replace a module that the test uses but does not import.
    modules = {name: importlib.import_module(name) for name in test["modules"] if name in names}
    vars(module).update(remote.names([name for name in names if name not in modules]) | modules)
    load(module, test["code"], _RUN_TEST_CASES)
    answer(PASSED)


class Remote:
    """Asks the program's process."""

    def __init__(self, peer: Peer, answer: Callable[[str], NoReturn]):
        self._peer, self._fail_dataset = peer, answer
        self._proxies: dict[int, Proxy] = {}
        self._exceptions: dict[int, type[BaseException]] = {}
        self._functions: list[Callable] = []

    def names(self, names: list[str]) -> dict:
        """Returns the program's globals of these names, without those that it does not have."""
        return self._result(self._ask({"names": names}))  # pyright: ignore[reportReturnType]

    def do(self, what: str, *args: object, **kwargs: object) -> object:
        """Runs the named operation on objects in the other process. Raises the exception that is raised there."""
        packed = {name: pack(value, self._refer) for name, value in kwargs.items()}
        reply = self._ask({"do": what, "args": [pack(value, self._refer) for value in args], "kwargs": packed})
        if "error" in reply:
            raise self._to_error(reply["error"], may_stop=what == "next")
        for mine, theirs in zip(args, reply.get("args", ()), strict=False):
            _update(mine, unpack(theirs, self._resolve))
        return self._result(reply)

    def _ask(self, message: dict) -> dict:
        try:
            self._peer.send(message)
            while "callback" in (reply := self._peer.receive()):
                self._peer.send(self._call_back(reply))
            sys.stdout.write(str(reply["printed"]))
        except Exception:  # noqa: BLE001 the program has ended or broken the protocol; the test must not survive that
            os._exit(1)
        return reply

    def _result(self, reply: dict) -> object:
        try:
            return unpack(reply["value"], self._resolve)
        except Exception:  # noqa: BLE001 as above
            os._exit(1)

    def _call_back(self, message: dict) -> dict:
        function = self._functions[message["callback"]]
        args = [unpack(value, self._resolve) for value in message["args"]]
        kwargs = {name: unpack(value, self._resolve) for name, value in message["kwargs"].items()}
        try:
            return {"value": pack(function(*args, **kwargs), self._refer)}
        except Exception as error:  # noqa: BLE001 the program gets what its callback raises
            return {"error": pack_error(error, lambda _: {"builtin": "object"})}

    def _refer(self, value: object) -> dict:
        if isinstance(value, Proxy):
            return {"object": number_of(value)}
        if isinstance(value, type) and (number := vars(value).get("__number__")) is not None:
            return {"object": number}
        name = getattr(value, "__name__", "")
        if isinstance(value, type | type(len)) and vars(builtins).get(name) is value:
            return {"builtin": name}
        if callable(value):
            self._functions.append(value)
            return {"callback": len(self._functions) - 1}
        self._fail_dataset(f"{CANNOT_PASS}{type(value).__name__}")

    def _resolve(self, reference: dict) -> object:
        ((kind, content),) = reference.items()
        if kind == "object":
            return self._proxies.setdefault(int(content), Proxy(self, int(content)))
        if kind == "callback":
            return self._functions[content]
        if kind == "module" and content.partition(".")[0] in sys.stdlib_module_names:
            return importlib.import_module(content)
        if kind != "exception":
            raise ValueError(f"{kind} is not passed")
        number, name, builtin = content
        if number not in self._exceptions:
            kinds = (_exception(builtin),)
            self._exceptions[number] = type(str(name), kinds, {"__number__": number, "__module__": "program"})
        return self._exceptions[number]

    def _to_error(self, content: dict, *, may_stop: bool) -> BaseException:
        """Returns the exception to raise. StopIteration would end a loop of the test early, as in `all(map(f,
        inputs))`."""
        try:
            kind = content["kind"]
            error_type = _exception(kind) if isinstance(kind, str) else self._resolve(kind)
            assert isinstance(error_type, type) and issubclass(error_type, BaseException)
            if issubclass(error_type, StopIteration | StopAsyncIteration | GeneratorExit) and not may_stop:
                error_type = RuntimeError
            error = error_type.__new__(error_type)
            error.args = tuple(unpack(content["args"], self._resolve))  # pyright: ignore[reportArgumentType]
            return error
        except Exception as error:  # noqa: BLE001 not an exception that can be made here
            return RuntimeError(f"the program raised an exception that cannot be passed: {error}")


def _exception(name: str) -> type[BaseException]:
    kind = vars(builtins)[name]
    if not issubclass(kind, BaseException):
        raise TypeError(f"{name} is not an exception")
    return kind


def _update(mine: object, theirs: object) -> object:
    """Returns `theirs`; if both are the same kind of container, it is `mine` with the new content."""
    if type(mine) is not type(theirs):
        return theirs
    if isinstance(mine, list) and isinstance(theirs, list):
        mine[:] = [_update(*pair) for pair in zip(mine, theirs, strict=False)] + theirs[len(mine) :]
    elif isinstance(mine, dict) and isinstance(theirs, dict):
        content = {key: _update(mine.get(key), value) for key, value in theirs.items()}
        mine.clear()
        mine.update(content)
    elif isinstance(mine, set) and isinstance(theirs, set):
        mine.clear()
        mine.update(theirs)
    elif isinstance(mine, bytearray) and isinstance(theirs, bytearray):
        mine[:] = theirs
    else:
        return theirs
    return mine


class Proxy:
    """Stands for an object of the program. Its attributes, items and calls are those of the object."""

    __slots__ = ("__number", "__opaque", "__remote")

    def __init__(self, remote: Remote, number: int):
        for name, value in (("remote", remote), ("number", number), ("opaque", False)):
            object.__setattr__(self, f"_Proxy__{name}", value)

    def __do(self, what: str, *args: object, **kwargs: object) -> object:
        return self.__remote.do(what, self, *args, **kwargs)

    def __plain(self) -> object:
        if self.__opaque:
            raise TypeError("the result of an operator of the program's own class has no plain value")
        value = self.__do("plain")
        if isinstance(value, Proxy):
            raise TypeError("not plain data")
        return value

    def __getattr__(self, name: str) -> object:
        return self.__do("getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        self.__do("setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self.__do("delattr", name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.__do("call", *args, **kwargs)

    def __iter__(self) -> Iterator:
        iterator = self.__do("iter")
        while True:
            try:
                item = self.__remote.do("next", iterator)
            except StopIteration:
                return
            yield item

    def __next__(self) -> object:
        return self.__do("next")

    def __bool__(self) -> bool:
        if self.__opaque:
            raise TypeError("the result of an operator of the program's own class has no truth value")
        return self.__do("bool") is True

    def __hash__(self) -> int:
        return self.__do("hash")  # pyright: ignore[reportReturnType] Python refuses all but an int

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Proxy) and self.__remote.do("isinstance", instance, self) is True

    def __float__(self) -> float:
        return float(self.__plain())  # pyright: ignore[reportArgumentType]

    def __int__(self) -> int:
        return int(self.__plain())  # pyright: ignore[reportArgumentType]

    def __index__(self) -> int:
        return operator.index(self.__plain())  # pyright: ignore[reportArgumentType]

    def __eq__(self, other: object) -> bool:
        return self.__compare("eq", other, unknown=False)

    def __ne__(self, other: object) -> bool:
        return self.__compare("ne", other, unknown=True)

    def __compare(self, what: str, other: object, unknown: bool | None = None) -> bool:
        if isinstance(other, Proxy):
            return self.__do(what, other) is True
        try:
            plain = self.__plain()
        except TypeError:
            if unknown is None:
                raise
            return unknown
        return getattr(operator, what)(plain, other)

    def __operate(self, what: str, *others: object, reflected: bool = False) -> object:
        operands = (*others, self) if reflected else (self, *others)
        if not others or not isinstance(others[0], Proxy):
            try:
                plain = [value.__plain() if isinstance(value, Proxy) else value for value in operands]
            except TypeError:
                result = self.__remote.do(what, *operands)
                if not isinstance(result, Proxy):
                    raise TypeError(f"{what} of data and an object of the program must be such an object") from None
                object.__setattr__(result, "_Proxy__opaque", True)
                return result
            return getattr(operator, what)(*plain)
        return self.__remote.do(what, *operands)


def number_of(proxy: Proxy) -> int:
    """Returns the number by which the program's process knows the object."""
    return object.__getattribute__(proxy, "_Proxy__number")


def _add_operators() -> None:
    for name in ("len", "str", "repr", "enter", "exit", "copy", "getitem", "setitem", "delitem"):
        setattr(Proxy, f"__{name}__", lambda self, *args, _name=name: self._Proxy__do(_name, *args))
    Proxy.__deepcopy__ = lambda self, _: self._Proxy__do("deepcopy")  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("lt", "le", "gt", "ge"):
        setattr(Proxy, f"__{name}__", lambda self, other, _name=name: self._Proxy__compare(_name, other))
    for name in ("neg", "pos", "abs", "invert"):
        setattr(Proxy, f"__{name}__", lambda self, _name=name: self._Proxy__operate(_name))
    arithmetic = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
    for name in (*arithmetic, "lshift", "rshift", "and", "or", "xor"):
        what = f"{name}_" if name in ("and", "or") else name
        setattr(Proxy, f"__{name}__", lambda self, other, _what=what: self._Proxy__operate(_what, other))
        reflected = lambda self, other, _what=what: self._Proxy__operate(_what, other, reflected=True)  # noqa: E731
        setattr(Proxy, f"__r{name}__", reflected)


_add_operators()
