# What is used of googleapis-common-protos, which has no types.
from collections.abc import Iterable, Sequence

from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message

class Status(Message):
    code: int
    message: str
    details: Sequence[Any]
    def __init__(self, *, code: int = ..., message: str = ..., details: Iterable[Any] = ...) -> None: ...
