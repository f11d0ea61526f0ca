"""Tests commands to all ranks, over real ZeroMQ, with workers that do as the test says."""

import asyncio
import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException

from services.common.errors import InternalError, PreconditionFailed, Reason
from services.trainer.ranks.calls import Message, Ranks, RanksAddress, connect, follow
from tests.support import PATIENCE_S, raises
from tests.trainer.rank_threads import threads_of
from tests.trainer.ranks.crew import Crew, FakeWorker


async def test_each_rank_gets_its_own_part_and_answers_in_rank_order(crew: Crew) -> None:
    parts = [Message({"own": rank}, [bytes([rank])]) for rank in range(2)]
    answers = await crew.ranks.call(FakeWorker.echo, parts, value={"x": [1.5, None]})
    assert [answer.body for answer in answers] == [
        {"rank": rank, "value": {"x": [1.5, None]}, "own": rank} for rank in range(2)
    ]
    assert [list(answer.frames) for answer in answers] == [[bytes([rank]), b"from the rank"] for rank in range(2)]


async def test_typed_error_of_one_rank_is_raised_and_the_ranks_go_on(crew: Crew) -> None:
    with pytest.raises(PreconditionFailed) as caught:
        await crew.ranks.call(FakeWorker.refuse)
    assert (caught.value.reason, caught.value.metadata) == (Reason.NOT_JOINED, {"field": "f"})
    assert (await crew.ranks.call(FakeWorker.echo, value=1))[1].body["value"] == 1
    assert not crew.failures


async def test_the_cause_is_raised_and_not_that_others_gave_up_for_it(crew: Crew) -> None:
    with pytest.raises(PreconditionFailed, match="the cause"):
        await crew.ranks.call(FakeWorker.give_up)


async def test_crash_of_one_rank_does_not_wait_for_the_others(crew: Crew) -> None:
    crew.close_gates()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InternalError) as caught:
            await crew.ranks.call(FakeWorker.crash)
    assert caught.value.reason is Reason.RANK_FAILED
    assert caught.value.metadata["rank"] == "1"
    assert "in crash" in caught.value.metadata["traceback"]
    assert len(crew.failures) == 1
    # Nothing is asked of such ranks again.
    with raises(InternalError, reason=Reason.RANK_FAILED):
        await crew.ranks.call(FakeWorker.echo, value=1)


@pytest.mark.parametrize("error", [CheckpointException("read", {}), SystemExit(1), KeyboardInterrupt()])
async def test_whatever_ends_a_command_is_an_answer(crew: Crew, error: BaseException) -> None:
    crew.close_gates()
    crew.workers[1].crash_error = error
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InternalError, match=type(error).__name__) as caught:
            await crew.ranks.call(FakeWorker.crash)
    assert caught.value.reason is Reason.RANK_FAILED
    assert len(crew.failures) == 1


async def test_an_answer_that_cannot_be_sent_is_a_failure(crew: Crew) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InternalError, match="not JSON serializable"):
            await crew.ranks.call(FakeWorker.answer_with_no_json)


async def test_a_method_that_is_not_declared_is_not_called(crew: Crew) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InternalError, match="KeyError: 'kill_epoch'"):
            await crew.ranks.call(FakeWorker.kill_epoch)


async def test_rank_that_hangs_after_anothers_error_ends_the_trainer(crew: Crew) -> None:
    crew.close_gates()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InternalError, match=r"\[0\] did not answer after: \w+"):
            await crew.ranks.call(FakeWorker.refuse_while_another_hangs, grace_s=0.2)
    assert len(crew.failures) == 1


async def cancel_at_the_gates(crew: Crew, command: Callable[..., Any]) -> None:
    """Closes the gates, calls `command`, and cancels the call once a rank has entered it."""
    crew.close_gates()
    call = asyncio.create_task(crew.ranks.call(command))
    await asyncio.to_thread(crew.workers[1].entered.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_canceled_call_is_finished_before_the_next(crew: Crew) -> None:
    await cancel_at_the_gates(crew, FakeWorker.apply_batch)
    after = asyncio.create_task(crew.ranks.call(FakeWorker.echo, value=2))
    crew.open_gates()
    async with asyncio.timeout(PATIENCE_S):
        assert [answer.body["value"] for answer in await after] == [2, 2]
    assert crew.workers[0].calls == ["apply"]


async def test_error_of_a_canceled_call_is_nobodys(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    await cancel_at_the_gates(crew, FakeWorker.refuse_at_the_gate)
    crew.open_gates()
    await crew.ranks.call(FakeWorker.echo, value=2)
    gc.collect()  # asyncio logs an error that nobody retrieved when its task is freed
    assert not [record for record in caplog.records if record.name == "asyncio"]


def answer_strangely(address: RanksAddress) -> None:
    """Runs a rank 1 that sends what is no answer, answers another command, and repeats its answer."""
    with connect(1, address) as (connection, _):
        while True:
            call_id, *parts = connection.recv_multipart()
            connection.send(call_id if not parts else b"once more")
            if not parts:
                continue
            if not parts[0].startswith(b'{"command"'):
                return
            value = json.loads(parts[0])["arguments"]["value"]
            for answers_to, body in ((b"call 99", "other"), (call_id, value), (call_id, "again")):
                connection.send_multipart([answers_to, *Message({"value": body}).pack()])


async def test_late_and_repeated_messages_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2, "127.0.0.1", pytest.fail)
    targets = [lambda: follow(0, ranks.address, FakeWorker(0)), lambda: answer_strangely(ranks.address)]
    async with threads_of(ranks, *targets), asyncio.timeout(PATIENCE_S):
        await ranks.wait_for_all()
        for value in range(5):
            answers = await ranks.call(FakeWorker.echo, value=value)
            assert [answer.body["value"] for answer in answers] == [value, value]
    dropped = [record.message for record in caplog.records if "dropped" in record.message]
    assert any("b'call 99'" in line for line in dropped) and any("b'once more'" in line for line in dropped)
    assert len(dropped) >= 5 + 5 + 4
