"""Real scorers in real worker processes."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from services.common.config.reward import RewardConfig
from services.reward.scorers.base import Item
from services.reward.scoring import ScoringRun
from tests.support import PATIENCE_S


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers can import reward_functions."""
    monkeypatch.chdir(Path(__file__).parent)


@pytest.fixture(scope="session")
def make_item() -> Callable[..., Item]:
    def make(completion: str, answer: str = "", **fields: object) -> Item:
        defaults = {"prompt": "p", "extra": {}, "num_tokens": 7, "finish_reason": "stop"}
        return Item(completion=completion, answer=answer, **{**defaults, **fields})

    return make


@pytest.fixture(scope="session")
def open_run() -> Callable[..., contextlib.AbstractAsyncContextManager[ScoringRun]]:
    @contextlib.asynccontextmanager
    async def opened(*scorers: dict, **settings: object) -> AsyncIterator[ScoringRun]:
        run = ScoringRun(RewardConfig.model_validate({"scorers": scorers, "timeout_s": PATIENCE_S, **settings}))
        try:
            await run.open()
            yield run
        finally:
            await run.close()

    return opened


def is_running(pid: int) -> bool:
    """Returns whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="session")
def gone() -> Callable[..., object]:
    async def wait(pids: list[int]) -> bool:
        """Returns whether all processes end. pidfds report the end, so nothing is polled."""
        loop, ended = asyncio.get_running_loop(), []
        for pid in pids:
            if not is_running(pid):
                continue
            with contextlib.suppress(ProcessLookupError):
                descriptor, event = os.pidfd_open(pid), asyncio.Event()
                loop.add_reader(descriptor, event.set)
                ended.append((descriptor, event))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(event.wait() for _, event in ended))
            return True
        except TimeoutError:
            return False
        finally:
            for descriptor, _ in ended:
                loop.remove_reader(descriptor)
                os.close(descriptor)

    return wait


@pytest.fixture(scope="session")
def hurried() -> Callable[..., contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def limited(has_limit: object, timeout_s: float) -> Iterator[None]:
        """Sets the time limit of a worker pool or a Remote for the block, for samples that never end."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(has_limit, "_timeout_s", timeout_s)
            yield

    return limited


@pytest.fixture(scope="session")
def children() -> Callable[[int], list[int]]:
    def of(pid: int) -> list[int]:
        threads = Path(f"/proc/{pid}/task").iterdir()
        found: list[int] = []
        for thread in threads:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                found += map(int, (thread / "children").read_text().split())
        return found

    return of
