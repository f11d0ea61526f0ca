from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PairMember(_message.Message):
    __slots__ = ("device", "socket")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    device: str
    socket: str
    def __init__(self, device: _Optional[str] = ..., socket: _Optional[str] = ...) -> None: ...

class PairHello(_message.Message):
    __slots__ = ("store_secret", "rank")
    STORE_SECRET_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    store_secret: bytes
    rank: int
    def __init__(self, store_secret: _Optional[bytes] = ..., rank: _Optional[int] = ...) -> None: ...

class PairBuffers(_message.Message):
    __slots__ = ("buffer_bytes", "memory_handles", "written_handles", "is_kept")
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_HANDLES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_HANDLES_FIELD_NUMBER: _ClassVar[int]
    IS_KEPT_FIELD_NUMBER: _ClassVar[int]
    buffer_bytes: int
    memory_handles: _containers.RepeatedScalarFieldContainer[bytes]
    written_handles: _containers.RepeatedScalarFieldContainer[bytes]
    is_kept: bool
    def __init__(self, buffer_bytes: _Optional[int] = ..., memory_handles: _Optional[_Iterable[bytes]] = ..., written_handles: _Optional[_Iterable[bytes]] = ..., is_kept: bool = ...) -> None: ...

class PairMapped(_message.Message):
    __slots__ = ("read_handles",)
    READ_HANDLES_FIELD_NUMBER: _ClassVar[int]
    read_handles: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, read_handles: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PairBucket(_message.Message):
    __slots__ = ("buffer", "start", "num_bytes")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    buffer: int
    start: int
    num_bytes: int
    def __init__(self, buffer: _Optional[int] = ..., start: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class PairUnmapped(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class PairMessage(_message.Message):
    __slots__ = ("hello", "buffers", "mapped", "written", "read", "unmapped")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    UNMAPPED_FIELD_NUMBER: _ClassVar[int]
    hello: PairHello
    buffers: PairBuffers
    mapped: PairMapped
    written: PairBucket
    read: PairBucket
    unmapped: PairUnmapped
    def __init__(self, hello: _Optional[_Union[PairHello, _Mapping]] = ..., buffers: _Optional[_Union[PairBuffers, _Mapping]] = ..., mapped: _Optional[_Union[PairMapped, _Mapping]] = ..., written: _Optional[_Union[PairBucket, _Mapping]] = ..., read: _Optional[_Union[PairBucket, _Mapping]] = ..., unmapped: _Optional[_Union[PairUnmapped, _Mapping]] = ...) -> None: ...
