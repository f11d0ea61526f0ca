"""Tests a streamed step with a real trainer servicer: the data that ranks get, and the effect of a lost stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from services.common.config.run import Config
from services.common.errors import InternalError, PreconditionFailed, Reason, Unavailable
from services.common.rpc.client import Client
from services.coordinator.rl.blocks import ByLength
from services.trainer.ranks.calls import rank_command
from tests.coordinator.fake_services import FakeReward
from tests.coordinator.runs.killing import CountingRank, make_run, surviving_services
from tests.trainer.harness_processes import marked

_TWO_BLOCKS = {"max_tokens_per_microbatch": 16}


def made(directory: Path, **trainer: Any) -> Config:
    directory.mkdir()
    return make_run(directory, 2, trainer=_TWO_BLOCKS | trainer)


def is_stream(method: Any, request: Any) -> bool:
    """Returns whether a call sends blocks as they are complete; a batch that is sent at once may be sent again."""
    return method.__name__ == "Train" and not callable(request)


@pytest.mark.parametrize("num_minibatches", [1, 2])
async def test_the_ranks_get_the_same_blocks_with_and_without_streaming(tmp_path: Path, num_minibatches: int) -> None:
    async with surviving_services() as services:
        await services.run(made(tmp_path / "on", num_minibatches=num_minibatches))
        streamed = [*services.rank.blocks]
        services.rank.blocks.clear()
        await services.run(made(tmp_path / "off", streaming="off", num_minibatches=num_minibatches))
        assert services.rank.blocks == streamed
        assert [len(batch) for batch in streamed] == [3, 3]  # two blocks and the counts
        assert [batch[1][0] for batch in streamed] == [f"{num_minibatches - 1}"] * 2


@pytest.mark.parametrize("streaming", ["auto", "off"])
async def test_the_answers_of_the_rows_are_recorded(tmp_path: Path, streaming: str) -> None:
    async with surviving_services() as services:
        config = made(tmp_path / "run", streaming=streaming)
        await services.run(config)
    files = [path for folder in ("batches", "evaluations") for path in (config.run_dir / folder).glob("*.parquet")]
    assert {path.parent.name for path in files} == {"batches", "evaluations"}
    for path in files:
        samples = pq.read_table(path).to_pylist()
        assert [row["answer"] for row in samples] == [str(int(row["prompt_id"].split("-")[0]) + 1) for row in samples]


@pytest.mark.parametrize("num_failing", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_minibatches_that_lack_groups_are_sent_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_failing: int
) -> None:
    def four(name: str, **trainer: Any) -> Config:
        config = made(tmp_path / name, num_minibatches=2, **trainer)
        return config.model_copy(update={"data": config.data.model_copy(update={"prompts_per_step": 4})})

    async with surviving_services() as services:
        config = four("all")
        await services.run(config)
        ids = pq.read_table(config.run_dir / "batches" / "step-000001.parquet")["prompt_id"].to_pylist()
        # Two or three groups of the second step are left, which make two mini-batches of one.
        failing = {ids[2 * number] for number in range(num_failing)}
        monkeypatch.setattr(FakeReward, "failing", property(lambda _: failing), raising=False)
        services.rank.blocks.clear()
        await services.run(four("on"))
        streamed = [*services.rank.blocks]
        services.rank.blocks.clear()
        await services.run(four("off", streaming="off"))
        assert services.rank.blocks == streamed
        assert [len(batch) for batch in streamed] == [5, 3]
        assert "caller has given up" not in "".join(r.message for r in caplog.records if r.levelname == "ERROR")


@pytest.mark.parametrize("num_messages", marked([0, 1, 2, 3, 5], long=[0, 2, 5]))
async def test_a_lost_stream_is_sent_again_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_messages: int
) -> None:
    call, lost = Client.call, []

    async def losing(self: Client, method: Any, request: Any, **options: Any) -> Any:
        if not is_stream(method, request):
            return await call(self, method, request, **options)

        async def cut() -> AsyncIterator[Any]:
            for _ in range(num_messages):
                yield await anext(request)
            lost.append(method)
            raise ConnectionError("the link is down")

        with contextlib.suppress(asyncio.CancelledError):  # that is how gRPC reports an iterator that raises
            await call(self, method, cut(), **options)
        raise Unavailable("the link is down", reason=Reason.UNREACHABLE)

    async with surviving_services() as services:
        await services.run(made(tmp_path / "undisturbed"))
        undisturbed = [*services.rank.blocks]
        services.rank.blocks.clear()
        monkeypatch.setattr(Client, "call", losing)
        outcome = await services.run(made(tmp_path / "lost"))
        assert (outcome.version, len(lost)) == (2, 2)
        assert services.rank.blocks == undisturbed


async def test_blocks_in_another_order_than_the_batch_are_sent_again_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens when a group of which many tokens were reported is sampled again and turns out shorter."""
    async with surviving_services() as services:
        await services.run(made(tmp_path / "undisturbed"))
        undisturbed = [*services.rank.blocks]
        services.rank.blocks.clear()
        decide = ByLength.decide
        monkeypatch.setattr(ByLength, "decide", lambda *args: [*reversed(decide(*args))])
        assert (await services.run(made(tmp_path / "disturbed"))).version == 2
        assert services.rank.blocks == undisturbed


async def test_an_error_of_the_trainer_ends_the_step_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Client.call

    async def failing(self: Client, method: Any, request: Any, **options: Any) -> Any:
        if is_stream(method, request):
            raise InternalError("a rank is gone", reason=Reason.RANK_FAILED)
        assert method.__name__ != "Train"  # it is not sent again
        return await call(self, method, request, **options)

    monkeypatch.setattr(Client, "call", failing)
    async with surviving_services() as services:
        with pytest.raises(InternalError, match="a rank is gone"):
            await services.run(made(tmp_path / "run"))
        assert services.rank.blocks == []


async def test_the_same_run_goes_on_after_a_block_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, failures = CountingRank.add_block, [PreconditionFailed("not this block")]

    @rank_command
    def failing_once(self: CountingRank, **part: Any) -> None:
        if self._added and failures:
            raise failures.pop()
        add(self, **part)

    monkeypatch.setattr(CountingRank, "add_block", failing_once)
    config = made(tmp_path / "run")
    async with surviving_services() as services:
        with pytest.raises(PreconditionFailed, match="not this block"):
            await services.run(config)
        assert (services.rank.blocks, services.rank._added) == ([], [])
        assert (await services.run(config)).version == 2
        resumed = [*services.rank.blocks]
        services.rank.blocks.clear()
        await services.run(made(tmp_path / "undisturbed"))
        assert services.rank.blocks == resumed
