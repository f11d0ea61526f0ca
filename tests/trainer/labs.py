"""Labs: processes beside the tests, forked from one that has imported both backends once, which takes 10 s."""

import multiprocessing
import os
from collections.abc import Callable
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(
    ["services.trainer.megatron.backend", "services.trainer.fsdp.backend", "tests.trainer.megatron_lab"]
)


def start_lab(name: str, *arguments: object) -> BaseProcess:
    """`main(*arguments)` of tests.trainer.<name> in a process that leads a session of its own."""
    lab = forks.Process(target=_main, args=(name, arguments), name=name)
    lab.start()
    return lab


def _main(name: str, arguments: tuple[object, ...]) -> None:
    os.setsid()
    main: Callable[..., int | None] = import_module(f"tests.trainer.{name}").main
    raise SystemExit(main(*arguments))


def run_lab(name: str, out: Path, *arguments: object, timeout_s: float = 1200) -> None:
    """Runs a lab, whose ranks leave their results, and their errors, in `out`, to its end."""
    lab = start_lab(name, *arguments)
    try:
        lab.join(timeout_s)
    finally:
        lab.kill()
    lab.join()
    errors = [file.read_text() for file in out.glob("*.error")]
    assert lab.exitcode == 0, "\n".join(errors)
