"""Tests replicas that end and replicas that cannot start, in processes of their own."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from lockstep.rollout.v1.rollout_pb2 import CloseRunRequest, GetInfoRequest
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.errors import Aborted, InternalError, InvalidInput, PreconditionFailed, Reason, Unavailable
from services.common.weights.group import WeightGroup
from tests.rollout.rollout_stack import PlayedTrainer, Replica
from tests.support import PATIENCE_S, descendants, engine_of, raises, running, still_there


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="") as name:  # in tmp_path, the paths of sockets would be too long
        yield Path(name)


@pytest_asyncio.fixture(scope="module")
async def mortals(start_replica: Callable, temporary: Path) -> AsyncIterator[list[tuple[Replica, object]]]:
    """Yields two replicas that tests may kill; the second has a directory for temporary files to itself.

    The second is no fork: it is started as an operator starts it.
    """
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(start_replica())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(temporary))
            second = await stack.enter_async_context(start_replica(running))
        yield [first, second]


@pytest_asyncio.fixture(scope="module")
async def opened(mortals: list, model: Callable) -> list[tuple[Replica, object]]:
    await asyncio.gather(*(replica.open(model("untied"), "mortal") for replica, _ in mortals))
    return mortals


@pytest.mark.parametrize("backend", [pytest.param("uni", marks=pytest.mark.long), "mp"])
async def test_an_engine_that_ends_in_order_leaves_no_files(
    mortals: list, temporary: Path, model: Callable, backend: str
):
    replica, process = mortals[1]
    for empty in (path for path in temporary.glob("lockstep-*") if not any(path.iterdir())):
        empty.rmdir()  # as a cleaner of old temporary files does
    await replica.open(model("untied"), "first", engine={"distributed_executor_backend": backend})
    titles = descendants(process.pid)
    assert sum("Worker" in title for title in titles.values()) == (backend == "mp")
    forks = [process.pid, *(pid for pid, title in titles.items() if "VLLM" in title)]
    sizes = {len(Path(f"/proc/{pid}/environ").read_bytes()) for pid in forks}
    assert len(sizes) == 1, "a process has an environment of its own, so it is a new interpreter"
    sockets = {path for path in temporary.rglob("*") if path.is_socket() and path.name != "engines"}
    assert sockets, "vLLM makes its sockets elsewhere"
    await replica.client.call(RolloutService.CloseRun, CloseRunRequest(run_id="first"), timeout_s=PATIENCE_S)
    assert not [path for path in sockets if path.exists()]
    assert "Traceback" not in replica.log.read_text()


async def test_a_replica_whose_temporary_files_were_removed_says_so_and_ends(
    start_replica: Callable, model: Callable, monkeypatch: pytest.MonkeyPatch
):
    with tempfile.TemporaryDirectory(prefix="") as name:
        monkeypatch.setenv("TMPDIR", name)
        async with start_replica() as (replica, process):
            ready = {"timeout_s": PATIENCE_S, "wait_for_ready": True}
            await replica.client.call(RolloutService.GetInfo, GetInfoRequest(), **ready)
            for path in Path(name).iterdir():
                shutil.rmtree(path)
            with raises(InternalError, reason=Reason.ENGINE_DEAD):
                await replica.open(model("untied"), "cleaned")
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 1
            assert f"{name}/" in replica.log.read_text() and "Traceback" not in replica.log.read_text()


@pytest.mark.long
async def test_an_engine_starts_however_long_the_path_of_the_temporary_directory_is(
    start_replica: Callable, tmp_path: Path, model: Callable, monkeypatch: pytest.MonkeyPatch
):
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    async with start_replica() as (replica, _):
        await replica.open(model("untied"), "long", tensor_parallel_size=2)
        assert (await replica.info()).num_workers == 2
        await replica.client.call(RolloutService.CloseRun, CloseRunRequest(run_id="long"), timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"engine": {"no_such_option": 1}}, "no_such_option"),
        ({"engine": {"dtype": "float7"}}, "float7"),
        ({"max_model_len": 100_000}, "max_model_len"),
        ({"engine": {"max_num_batched_tokens": "many"}}, "max_num_batched_tokens"),
        ({"no_such_key": 1}, "no_such_key"),
        ({"max_samples": 0}, "max_samples"),
    ],
)
async def test_an_engine_that_cannot_be_made_is_the_callers_mistake(mortals: list, model: Callable, config, names):
    replica, _ = mortals[0]
    with pytest.raises(InvalidInput, match=names) as raised:
        await replica.open(model("untied"), "bad", **config)
    assert "\n" not in raised.value.message
    assert "Traceback" not in raised.value.message
    info = await replica.info()
    assert (info.info.state, info.num_workers) == ("idle", 0)
    with raises(PreconditionFailed, reason=Reason.RUN_NOT_OPEN):
        await replica.receive(1, 0)


async def test_dummy_weights_are_never_served(opened: list):
    replica, _ = opened[0]
    for stamp in (PolicyStamp(version=0, digest="0" * 32), PolicyStamp()):
        with raises(PreconditionFailed, reason=Reason.NOT_SERVING):
            await replica.greedy(stamp)
    with raises(PreconditionFailed, reason=Reason.DIGEST_MISMATCH):  # nothing was received either
        await replica.commit(PolicyStamp(version=0, digest="0" * 32))


async def test_an_engine_that_hangs_is_missed_by_name_and_replaced_in_another_run(opened: list, model: Callable):
    replica, _ = opened[0]
    played = PlayedTrainer(model("untied"), replica, "mortal")
    await played.publish(0)
    engine = engine_of(replica.pid)
    os.kill(engine, signal.SIGSTOP)
    played.epoch += 1  # an epoch in which a member gave up has ended for good
    message = played.describe_group(played.epoch, timeout_s=3.0)
    joining = asyncio.create_task(replica.join(message, played.plan.message))
    with raises(Aborted) as raised:
        await asyncio.to_thread(WeightGroup, message, rank=0, device=torch.device("cpu"))
    assert raised.value.metadata["absent"] == "1"
    assert (await replica.info()).num_workers == 1  # the service cannot know that its engine hangs
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    await replica.client.call(RolloutService.CloseRun, CloseRunRequest(run_id="mortal"), timeout_s=PATIENCE_S)
    assert not still_there([engine])
    await replica.open(model("untied"), "mortal")
    played.draw(seed=1)
    await played.assert_exact(await played.publish(1))


async def test_a_killed_service_leaves_no_engine(opened: list):
    replica, process = opened[0]
    below = descendants(replica.pid)
    assert below
    process.kill()
    process.wait()
    assert not still_there(below)


async def test_a_killed_engine_ends_its_service_with_a_word_and_no_files(
    opened: list, model: Callable, temporary: Path
):
    replica, process = opened[1]
    played = PlayedTrainer(model("untied"), replica, "mortal")
    stamp = await played.publish(0)
    below = descendants(replica.pid)
    engine = engine_of(replica.pid)
    generating = asyncio.create_task(replica.generate(stamp, seeds=range(32), temperature=1.0, max_tokens=480))
    await replica.until_sampling()
    os.kill(engine, signal.SIGKILL)
    with raises(Unavailable, reason=Reason.ENGINE_DEAD):
        await generating
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 1
    assert not still_there(below)
    assert not list(temporary.iterdir())
    assert "_remove_temp_dir" not in replica.log.read_text()
