from lockstep.types.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnvironmentFailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENVIRONMENT_FAILURE_REASON_UNSPECIFIED: _ClassVar[EnvironmentFailureReason]
    ENVIRONMENT_FAILURE_REASON_TIMEOUT: _ClassVar[EnvironmentFailureReason]
    ENVIRONMENT_FAILURE_REASON_CRASHED: _ClassVar[EnvironmentFailureReason]
    ENVIRONMENT_FAILURE_REASON_REFUSED: _ClassVar[EnvironmentFailureReason]
    ENVIRONMENT_FAILURE_REASON_INVALID_REPLY: _ClassVar[EnvironmentFailureReason]
    ENVIRONMENT_FAILURE_REASON_NEIGHBOR: _ClassVar[EnvironmentFailureReason]
ENVIRONMENT_FAILURE_REASON_UNSPECIFIED: EnvironmentFailureReason
ENVIRONMENT_FAILURE_REASON_TIMEOUT: EnvironmentFailureReason
ENVIRONMENT_FAILURE_REASON_CRASHED: EnvironmentFailureReason
ENVIRONMENT_FAILURE_REASON_REFUSED: EnvironmentFailureReason
ENVIRONMENT_FAILURE_REASON_INVALID_REPLY: EnvironmentFailureReason
ENVIRONMENT_FAILURE_REASON_NEIGHBOR: EnvironmentFailureReason

class EnvironmentFailure(_message.Message):
    __slots__ = ("reason", "message", "alone")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    reason: EnvironmentFailureReason
    message: str
    alone: bool
    def __init__(self, reason: _Optional[_Union[EnvironmentFailureReason, str]] = ..., message: _Optional[str] = ..., alone: bool = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("name", "arguments_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments_json: str
    def __init__(self, name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("run_id", "episode_id", "seed", "row_json", "alone")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROW_JSON_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    episode_id: str
    seed: int
    row_json: str
    alone: bool
    def __init__(self, run_id: _Optional[str] = ..., episode_id: _Optional[str] = ..., seed: _Optional[int] = ..., row_json: _Optional[str] = ..., alone: bool = ...) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ("messages", "failure")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    failure: EnvironmentFailure
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., failure: _Optional[_Union[EnvironmentFailure, _Mapping]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("run_id", "episode_id", "turn", "text", "num_tokens", "finish_reason", "is_reasoning")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    IS_REASONING_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    episode_id: str
    turn: int
    text: str
    num_tokens: int
    finish_reason: _types_pb2.FinishReason
    is_reasoning: bool
    def __init__(self, run_id: _Optional[str] = ..., episode_id: _Optional[str] = ..., turn: _Optional[int] = ..., text: _Optional[str] = ..., num_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., is_reasoning: bool = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("messages", "reward", "done", "tool_calls", "failure", "num_calls", "num_failed_calls")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_CALLS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_CALLS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    reward: float
    done: bool
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    failure: EnvironmentFailure
    num_calls: int
    num_failed_calls: int
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., reward: _Optional[float] = ..., done: bool = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., failure: _Optional[_Union[EnvironmentFailure, _Mapping]] = ..., num_calls: _Optional[int] = ..., num_failed_calls: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("run_id", "episode_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    episode_id: str
    def __init__(self, run_id: _Optional[str] = ..., episode_id: _Optional[str] = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
