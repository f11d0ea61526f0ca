# What is used of googleapis-common-protos, which has no types.
from collections.abc import Mapping

from google.protobuf.message import Message

class ErrorInfo(Message):
    reason: str
    domain: str
    metadata: Mapping[str, str]
    def __init__(self, *, reason: str = ..., domain: str = ..., metadata: Mapping[str, str] = ...) -> None: ...
