"""Compares the signature of a user's function with the arguments that it will get. Imports nothing heavy."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def require_takes(function: Callable[..., Any], name: str, args: Sequence[str], kwargs: Mapping[str, Any]) -> None:
    """Checks that a function can be called, without calling it. `args` are names of the positional arguments.

    Raises:
        TypeError: It does not take these arguments; the message has `name`, the arguments and the signature.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C may have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([*args, *(f"{key}=..." for key in kwargs)])
        raise TypeError(f"{name} is called with ({given}), but is defined as {signature}: {error}") from error
