"""Tests that data arrives as it was sent, or is refused."""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep.reward.v1.reward_pb2 import Candidate, Score, ScoreRequest, ScoreResponse
from lockstep.trainer.v1.trainer_pb2 import ROLE_POLICY, ForwardHeader, ForwardRequest, ForwardResponse
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches import encode
from services.common.errors import DataLoss, Reason
from services.common.rpc.transfer import from_messages, require_sealed, seal, to_messages
from tests.support import make_batch, raises

HEADER = ForwardHeader(role=ROLE_POLICY, temperature=1.0)
FRAMES = list(encode(make_batch(4, 3, PolicyStamp(version=3, digest="0" * 32)), frame_bytes=1000))


async def sent(kind: Callable[..., Any] = ForwardRequest, header: ForwardHeader | None = HEADER) -> list[Any]:
    return [message async for message in to_messages(kind, FRAMES, header)]


async def arriving(messages: Iterable[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


def with_flipped_bit(frame: bytes, at: int, bit: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1 << bit]) + frame[at + 1 :]


async def test_a_stream_arrives_as_it_was_sent() -> None:
    assert await from_messages(arriving(await sent()), has_header=True) == (HEADER, FRAMES)
    answers = arriving(await sent(ForwardResponse, None))
    assert await from_messages(answers, has_header=False) == (None, FRAMES)


@given(index=st.integers(1, len(FRAMES)), at=st.integers(0, 900), bit=st.integers(0, 7))
async def test_a_flipped_bit_in_any_frame_is_refused(index: int, at: int, bit: int) -> None:
    messages = await sent()
    frame = messages[index].frame
    messages[index].frame = with_flipped_bit(frame, at % len(frame), bit)
    with raises(DataLoss, reason=Reason.CORRUPT_TRANSFER):
        await from_messages(arriving(messages), has_header=True)


CHANGES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "another temperature": lambda m: [ForwardRequest(header=ForwardHeader(role=ROLE_POLICY, temperature=1.5)), *m[1:]],
    "a frame is lost": lambda m: [*m[:1], *m[2:]],
    "a frame comes twice": lambda m: [*m[:2], *m[1:]],
    "two frames are swapped": lambda m: [m[0], m[2], m[1], *m[3:]],
    "two frames are one": lambda m: [m[0], ForwardRequest(frame=m[1].frame + m[2].frame), *m[3:]],
    "a frame is no field": lambda m: [m[0], ForwardRequest(), *m[2:]],
    "a frame after the end": lambda m: [*m, m[1]],
    "another hash": lambda m: [*m[:-1], ForwardRequest(sha256=with_flipped_bit(m[-1].sha256, 5, 2))],
    "the stream ends early": lambda m: m[:-2],
    "the hash is missing": lambda m: m[:-1],
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_stream_that_changed_on_the_way_is_refused(change: str) -> None:
    with raises(DataLoss, reason=Reason.CORRUPT_TRANSFER):
        await from_messages(arriving(CHANGES[change](await sent())), has_header=True)


async def test_an_answer_that_changed_on_the_way_is_refused() -> None:
    messages = await sent(ForwardResponse, None)
    messages[1].frame = with_flipped_bit(messages[1].frame, 700, 3)
    for changed in (messages, messages[1:], messages[:-1], []):
        with pytest.raises(DataLoss):
            await from_messages(arriving(changed), has_header=False)


REQUEST = ScoreRequest(prompt="1 + 1", candidates=[Candidate(text="2"), Candidate(text="3")])
ANSWER = ScoreResponse(scores=[Score(reward=1, components={"b": 1, "a": 0.5}), Score()], scorer="exact 1")


def sealed(request: ScoreRequest) -> ScoreResponse:
    answer = ScoreResponse()
    answer.CopyFrom(ANSWER)
    return seal(request, answer)


def test_a_sealed_answer_is_taken() -> None:
    answer = ScoreResponse.FromString(sealed(REQUEST).SerializeToString())
    require_sealed(REQUEST, answer)
    assert answer == ANSWER


@pytest.mark.parametrize(
    ("arrived", "change"),
    [
        (REQUEST, {"scores": [Score(reward=-1), Score()]}),
        (REQUEST, {"sha256": b""}),
        (REQUEST, {"sha256": b"0" * 32}),
        (ScoreRequest(prompt="1 + 2", candidates=REQUEST.candidates), {}),
    ],
)
def test_a_change_of_request_or_answer_is_refused(arrived: ScoreRequest, change: dict[str, Any]) -> None:
    answer = sealed(arrived)
    fields = {"scores": answer.scores, "scorer": answer.scorer, "sha256": answer.sha256}
    with pytest.raises(DataLoss) as caught:
        require_sealed(REQUEST, ScoreResponse(**{**fields, **change}))
    assert caught.value.reason is Reason.CORRUPT_TRANSFER
