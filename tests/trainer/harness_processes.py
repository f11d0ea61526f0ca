"""Starts harnesses: processes beside the tests, forked from one that has imported both backends, which takes 10 s."""

import gc
import itertools
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import pytest

Name = TypeVar("Name", str, tuple[str, str])
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(
    ["services.trainer.megatron.backend", "services.trainer.fsdp.backend", "tests.trainer.megatron_harness"]
)


def marked(names: Iterable[Any], long: Collection[Any]) -> list[Any]:
    """Returns parameters of a test; only make test-long runs those in `long`."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]


def few_of(few: Collection[tuple[Any, ...]], *axes: Iterable[Any]) -> list[Any]:
    """Returns all combinations of `axes` as parameters of a test; only make test-long runs those that are not in
    `few`."""
    cases = list(itertools.product(*axes))
    assert set(few) <= set(cases)
    return [pytest.param(*case, marks=[] if case in few else [pytest.mark.long]) for case in cases]


def pairs_of(pairs: Iterable[tuple[str, str]], long: Collection[tuple[str, str]]) -> list[Any]:
    """Returns pairs as parameters of a test, named "A to B"; only make test-long runs those in `long`."""
    return [pytest.param(*pair, marks=[pytest.mark.long] * (pair in long), id=" to ".join(pair)) for pair in pairs]


def to_run(request: pytest.FixtureRequest, file: str, names: Iterable[Name], long: Collection[Name]) -> list[Name]:
    """Returns the names, or pairs of names, that the chosen tests of `file` need: those in `long` only if one of these
    tests is."""
    items = [item for item in request.session.items if item.path == Path(file)]
    is_long = any(item.get_closest_marker("long") for item in items)
    return [name for name in names if is_long or name not in long]


def start_harness(name: str, *arguments: object) -> BaseProcess:
    """Starts `main(*arguments)` of tests.trainer.<name> in a process that leads a session of its own."""
    harness = forks.Process(target=_main, args=(name, arguments), name=name)
    harness.start()
    return harness


def _main(name: str, arguments: tuple[object, ...]) -> None:
    os.setsid()
    gc.freeze()  # as in tests/conftest.py
    main: Callable[..., int | None] = import_module(f"tests.trainer.{name}").main
    raise SystemExit(main(*arguments))


def run_harness(name: str, out: Path, *arguments: object, timeout_s: float = 1200) -> None:
    """Runs a harness to its end; its ranks write their results and their errors to `out`."""
    harness = start_harness(name, *arguments)
    try:
        harness.join(timeout_s)
    finally:
        harness.kill()
    harness.join()
    errors = [file.read_text() for file in out.glob("*.error")]
    assert harness.exitcode == 0, "\n".join(errors)
