"""Runs work in a background thread of a rank."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Runs `work` in a daemon thread; the future has its result or error."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (the future's reader gets it)
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
