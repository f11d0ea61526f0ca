"""Sends training data with its SHA-256, and refuses data that was changed on the way, over plaintext too.

A batch is a stream of messages: a header if the call has one, frames, and last the SHA-256 of all of it. A stream that
was cut short or changed on the way is refused. An answer to one message has the SHA-256 of that message as it arrived
and of the answer itself, so that a change of either is noticed by the caller.
"""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from google.protobuf.message import Message

from services.common.errors import DataLoss, InvalidInput, Reason

Sent = TypeVar("Sent")
Answer = TypeVar("Answer", bound=Any)


async def to_messages(
    kind: Callable[..., Sent], frames: Iterable[bytes], header: Message | None = None
) -> AsyncGenerator[Sent, None]:
    """Yields messages of `kind`: the header, if there is one, then the frames, then the SHA-256."""
    sha256 = _Sha256()
    if header is not None:
        sha256.add(header.SerializeToString(deterministic=True))
        yield kind(header=header)
    for frame in frames:
        sha256.add(frame)
        yield kind(frame=frame)
    yield kind(sha256=sha256.digest)


async def from_messages(messages: AsyncIterator[Any], *, has_header: bool) -> tuple[Any, list[bytes]]:
    """Returns header and frames of a stream that `to_messages` made; the header is None if the stream has none."""
    header: Any = None
    frames: list[bytes] = []
    sha256, expected = _Sha256(), b""
    async for message in messages:
        part = message.WhichOneof("part")
        if has_header and (part == "header") != (header is None):
            raise InvalidInput("header: must be the first message and be sent once", field="header")
        if part == "header":
            header = message.header
            sha256.add(header.SerializeToString(deterministic=True))
        elif part == "sha256":
            expected = message.sha256
        else:
            frames.append(message.frame)
            sha256.add(message.frame)
    if has_header and header is None:
        raise InvalidInput("header: must be the first message", field="header")
    if expected != sha256.digest:
        why = "its bytes changed on the way" if expected else "it ended before its SHA-256"
        raise DataLoss(f"a batch of {len(frames)} frames did not arrive as sent: {why}", reason=Reason.CORRUPT_TRANSFER)
    return header, frames


def seal(request: Message, answer: Answer) -> Answer:
    """Sets `answer.sha256`, the hash of the request as it arrived and of the answer. Returns the answer."""
    answer.sha256 = _hash(request, answer)
    return answer


def require_sealed(request: Message, answer: Answer) -> Answer:
    """Checks `answer.sha256` and clears it. Returns the answer."""
    expected = answer.sha256
    answer.ClearField("sha256")
    if expected != _hash(request, answer):
        what = f"{type(request).__name__} or its answer changed on the way" if expected else "the answer has no SHA-256"
        raise DataLoss(what, reason=Reason.CORRUPT_TRANSFER)
    return answer


def _hash(*messages: Message) -> bytes:
    sha256 = _Sha256()
    for message in messages:
        sha256.add(message.SerializeToString(deterministic=True))
    return sha256.digest


class _Sha256:
    """Hashes parts, each preceded by its length in 8 bytes, so that their boundaries count too."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, part: bytes) -> None:
        self._hash.update(len(part).to_bytes(8, "big"))
        self._hash.update(part)

    @property
    def digest(self) -> bytes:
        return self._hash.digest()
