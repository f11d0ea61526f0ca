"""Defines what a test has in place of the program's objects.

A value of the program is read once, into plain data, before anything is compared with it. Otherwise its class could
answer each comparison as it needs: `1 < p < 91 and 91 % p == 0` reads p three times. Therefore:

- An object whose class derives from a number or text is that number or text (`Value`), as it was when it arrived. Only
  attributes that these types lack are asked for.
- Every other object is a `Proxy`. If its class derives from a plain container, or can be read as one (it has a length
  and can be iterated), length, items and iteration come from one reading. Where it derives from one, comparisons do so
  too.
- The same question gets the same answer until the test does something that can change an object: a call, or setting an
  attribute or item (see Remote.do).
- An operator could see the value that is expected and pretend to match it, or return what the program likes (`r * r`).
  So its result must be an object, which then has neither a plain value nor a truth value: `abs(f(1) - 0.5) < 1e-6`
  cannot be answered by the class of `f(1)`.

Objects that the test itself makes by calling a name such as `Matrix` (a class under test, by its capital letter) answer
operators among themselves, length, items and iteration as the program says, because these are what is tested.
"""

import operator
from collections.abc import Iterator
from types import TracebackType
from typing import Any


class Value:
    """Is mixed into a plain type, for an object of the program that derives from it."""

    def __copy__(self) -> "Value":
        return self

    def __deepcopy__(self, _: object) -> "Value":
        return self


_VALUES: dict[type, Any] = {
    plain: type(plain.__name__, (Value, plain), {}) for plain in (int, float, complex, str, bytes)
}


def value_of(remote: Any, number: int, plain: object) -> object:
    """Returns the plain value as an object that can be asked for the attributes of the program's."""
    value = _VALUES[type(plain)](plain)
    vars(value).update(__remote__=remote, __number__=number)
    return value


class Proxy:
    """Stands for an object of the program. Its attributes and calls are those of the object.

    `is_made` says that the test made it by calling a class under test, which is a proxy that `makes`.
    """

    __slots__ = ("__fixed", "__is_made", "__makes", "__number", "__opaque", "__remote")
    __is_made: bool
    __opaque: bool

    def __init__(self, remote: Any, number: int, *, is_made: bool = False):  # a checker.Remote
        values = {"remote": remote, "number": number, "opaque": False, "is_made": is_made, "makes": False}
        for name, value in {**values, "fixed": None}.items():
            object.__setattr__(self, f"_Proxy__{name}", value)

    def __do(self, what: str, *args: object, **kwargs: object) -> object:
        return self.__remote.do(what, self, *args, **kwargs)

    def __plain(self) -> object:
        if self.__opaque:
            raise TypeError("the result of an operator of the program's own class has no plain value")
        if self.__fixed is not None:
            return self.__fixed
        value = self.__do("plain")
        if isinstance(value, Proxy):
            raise TypeError("not plain data")
        if not isinstance(value, list | dict | set | bytearray):  # others cannot change
            object.__setattr__(self, "_Proxy__fixed", value)
        return value

    def __content(self) -> Any:
        """Returns the items that the object holds, read at once; None if it holds none or is under test."""
        if self.__is_made or self.__opaque:
            return None
        for read in (self.__plain, lambda: self.__do("items")):
            try:
                value = read()
            except Exception:  # noqa: BLE001 the program's code may raise anything
                continue
            return None if isinstance(value, Proxy) else value
        return None

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] isinstance() asks this too
        try:
            return type(self.__plain())
        except Exception:  # noqa: BLE001 as above
            return Proxy

    def __call__(self, *args: object, **kwargs: object) -> object:
        result = self.__remote.do("call", self, *args, is_made=self.__makes, **kwargs)
        if type(result) is Proxy and not self.__makes:  # what a function returns is a value, also a made object
            object.__setattr__(result, "_Proxy__is_made", False)
        return result

    def __len__(self) -> int:
        content = self.__content()
        return self.__do("len") if content is None else len(content)  # pyright: ignore[reportReturnType] Python checks

    def __getitem__(self, key: object) -> object:
        content = self.__content()
        if isinstance(content, dict) or (content is not None and isinstance(key, int | slice)):
            return content[key]
        return self.__do("getitem", key)

    def __contains__(self, item: object) -> bool:
        if self.__is_made and not self.__opaque:
            return self.__do("contains", item) is True
        content = self.__content()
        return any(item is entry or item == entry for entry in (self if content is None else content))

    def __iter__(self) -> Iterator:
        content = self.__content()
        if content is not None:
            yield from content
            return
        iterator = self.__do("iter")
        while True:
            try:
                item = self.__remote.do("next", iterator)
            except StopIteration:
                return
            yield item

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        is_check = self.__remote.is_check(error, trace)
        try:
            is_suppressed = bool(self.__do("exit", kind, error, None))
        except Exception:
            if is_check:
                return False
            raise
        return is_suppressed and not is_check

    def __bool__(self) -> bool:
        if self.__opaque:
            raise TypeError("the result of an operator of the program's own class has no truth value")
        plain = self.__known()
        return self.__do("bool") is True if plain is None else bool(plain[0])

    def __hash__(self) -> int:
        plain = self.__known()
        return self.__do("hash") if plain is None else hash(plain[0])  # pyright: ignore[reportReturnType] Python checks

    def __known(self) -> tuple[object] | None:
        """Returns the plain value of an object that is not under test, in a tuple; None if it has none."""
        try:
            return None if self.__is_made else (self.__plain(),)
        except TypeError:
            return None

    def __instancecheck__(self, instance: object) -> bool:
        return number_of(instance) is not None and self.__remote.do("isinstance", instance, self) is True

    def __format__(self, spec: str) -> str:
        return format(self.__plain(), spec) if spec else str(self)

    def __eq__(self, other: object) -> bool:
        return self.__compare("eq", other, unknown=False)

    def __ne__(self, other: object) -> bool:
        return self.__compare("ne", other, unknown=True)

    def __compare(self, what: str, other: object, unknown: bool | None = None) -> bool:
        if type(other) is Proxy and (
            (self.__is_made and other.__is_made) or (self.__known() is None and other.__known() is None)
        ):
            return self.__do(what, other) is True
        try:
            plain = self.__plain()
            theirs = other.__plain() if type(other) is Proxy else other
        except TypeError:
            if unknown is None:
                raise
            return unknown
        return getattr(operator, what)(plain, theirs)

    def __operate(self, what: str, *others: object, reflected: bool = False) -> object:
        operands = (*others, self) if reflected else (self, *others)
        if all(type(value) is Proxy and value.__is_made and not value.__opaque for value in operands):
            return self.__remote.do(what, *operands, is_made=True)
        try:
            plain = [value.__plain() if type(value) is Proxy else value for value in operands]
        except TypeError:
            result = self.__remote.do(what, *operands)
            if type(result) is not Proxy:
                raise TypeError(f"{what} of a value of the program's own class must be such an object") from None
            object.__setattr__(result, "_Proxy__opaque", True)
            return result
        return getattr(operator, what)(*plain)


def number_of(value: object) -> int | None:
    """Returns the number by which the program's process knows the object; None if it is not the program's."""
    if type(value) is Proxy:
        return object.__getattribute__(value, "_Proxy__number")
    return vars(value)["__number__"] if isinstance(value, Value) else None


def set_under_test(proxy: object) -> None:
    if type(proxy) is Proxy:
        object.__setattr__(proxy, "_Proxy__makes", True)


def lines_of(trace: TracebackType | None, variables: dict[str, object]) -> list[int]:
    """Returns the lines of a traceback that are in the module with these variables, outermost first."""
    lines = []
    while trace is not None:
        lines += [trace.tb_lineno] if trace.tb_frame.f_globals is variables else []
        trace = trace.tb_next
    return lines


def _add_operators() -> None:
    attributes = ("getattr", "setattr", "delattr")
    for name in (*attributes, "str", "repr", "next", "enter", "copy", "setitem", "delitem"):
        setattr(Proxy, f"__{name}__", lambda self, *args, _name=name: self._Proxy__do(_name, *args))
    for name in attributes:
        setattr(Value, f"__{name}__", lambda self, *args, _name=name: vars(self)["__remote__"].do(_name, self, *args))
    Proxy.__deepcopy__ = lambda self, _: self._Proxy__do("deepcopy")  # pyright: ignore[reportAttributeAccessIssue]
    for name, to_number in (("float", float), ("int", int), ("index", operator.index)):
        setattr(Proxy, f"__{name}__", lambda self, _to_number=to_number: _to_number(self._Proxy__plain()))
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
