from lockstep.reward.v1 import environment_pb2 as _environment_pb2
from lockstep.types.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_TIMEOUT: _ClassVar[FailureReason]
    FAILURE_REASON_CRASHED: _ClassVar[FailureReason]
    FAILURE_REASON_INVALID_ANSWER: _ClassVar[FailureReason]
    FAILURE_REASON_ERROR: _ClassVar[FailureReason]
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_TIMEOUT: FailureReason
FAILURE_REASON_CRASHED: FailureReason
FAILURE_REASON_INVALID_ANSWER: FailureReason
FAILURE_REASON_ERROR: FailureReason

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _types_pb2.ServiceInfo
    def __init__(self, info: _Optional[_Union[_types_pb2.ServiceInfo, _Mapping]] = ...) -> None: ...

class OpenRunRequest(_message.Message):
    __slots__ = ("run_id", "config_json", "environment_json", "answer_column")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    ANSWER_COLUMN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    config_json: str
    environment_json: str
    answer_column: str
    def __init__(self, run_id: _Optional[str] = ..., config_json: _Optional[str] = ..., environment_json: _Optional[str] = ..., answer_column: _Optional[str] = ...) -> None: ...

class OpenRunResponse(_message.Message):
    __slots__ = ("scorer", "environment", "tools_json", "roles", "reads_tokens")
    SCORER_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    READS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    scorer: str
    environment: str
    tools_json: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    reads_tokens: bool
    def __init__(self, scorer: _Optional[str] = ..., environment: _Optional[str] = ..., tools_json: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., reads_tokens: bool = ...) -> None: ...

class CloseRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class CloseRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("text", "num_tokens", "finish_reason", "agent", "tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    num_tokens: int
    finish_reason: _types_pb2.FinishReason
    agent: AgentResult
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, text: _Optional[str] = ..., num_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., agent: _Optional[_Union[AgentResult, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class AgentResult(_message.Message):
    __slots__ = ("exit_code", "files")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    files: _containers.ScalarMap[str, bytes]
    def __init__(self, exit_code: _Optional[int] = ..., files: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("prompt_id", "prompt", "answer", "extra_json", "candidates", "run_id", "messages", "answer_is_integer")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ANSWER_IS_INTEGER_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    prompt: str
    answer: str
    extra_json: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    run_id: str
    messages: _containers.RepeatedCompositeFieldContainer[_environment_pb2.Message]
    answer_is_integer: bool
    def __init__(self, prompt_id: _Optional[str] = ..., prompt: _Optional[str] = ..., answer: _Optional[str] = ..., extra_json: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., run_id: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[_environment_pb2.Message, _Mapping]]] = ..., answer_is_integer: bool = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason", "scorer", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: FailureReason
    scorer: str
    message: str
    def __init__(self, reason: _Optional[_Union[FailureReason, str]] = ..., scorer: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("reward", "components", "failure")
    class ComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REWARD_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    reward: float
    components: _containers.ScalarMap[str, float]
    failure: Failure
    def __init__(self, reward: _Optional[float] = ..., components: _Optional[_Mapping[str, float]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "scorer", "sha256")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    scorer: str
    sha256: bytes
    def __init__(self, scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ..., scorer: _Optional[str] = ..., sha256: _Optional[bytes] = ...) -> None: ...
