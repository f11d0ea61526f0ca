from lockstep.reward.v1 import environment_pb2 as _environment_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Begin(_message.Message):
    __slots__ = ("run_id", "episode_id", "seed", "row_json", "alone", "max_model_len")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROW_JSON_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    episode_id: str
    seed: int
    row_json: str
    alone: bool
    max_model_len: int
    def __init__(self, run_id: _Optional[str] = ..., episode_id: _Optional[str] = ..., seed: _Optional[int] = ..., row_json: _Optional[str] = ..., alone: bool = ..., max_model_len: _Optional[int] = ...) -> None: ...

class CallAnswer(_message.Message):
    __slots__ = ("call", "message_json", "finish_reason", "num_prompt_tokens", "num_sampled_tokens", "refusal", "refusal_code", "is_over", "stop_sequence")
    CALL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_JSON_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_CODE_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    call: int
    message_json: str
    finish_reason: str
    num_prompt_tokens: int
    num_sampled_tokens: int
    refusal: str
    refusal_code: str
    is_over: bool
    stop_sequence: str
    def __init__(self, call: _Optional[int] = ..., message_json: _Optional[str] = ..., finish_reason: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_sampled_tokens: _Optional[int] = ..., refusal: _Optional[str] = ..., refusal_code: _Optional[str] = ..., is_over: bool = ..., stop_sequence: _Optional[str] = ...) -> None: ...

class PlayRequest(_message.Message):
    __slots__ = ("begin", "answer")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    answer: CallAnswer
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., answer: _Optional[_Union[CallAnswer, _Mapping]] = ...) -> None: ...

class AgentCall(_message.Message):
    __slots__ = ("number", "request_json", "body_sha256", "overridden", "counts")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_JSON_FIELD_NUMBER: _ClassVar[int]
    BODY_SHA256_FIELD_NUMBER: _ClassVar[int]
    OVERRIDDEN_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_json: str
    body_sha256: str
    overridden: _containers.RepeatedScalarFieldContainer[str]
    counts: bool
    def __init__(self, number: _Optional[int] = ..., request_json: _Optional[str] = ..., body_sha256: _Optional[str] = ..., overridden: _Optional[_Iterable[str]] = ..., counts: bool = ...) -> None: ...

class AgentEnd(_message.Message):
    __slots__ = ("exit_code", "text", "files", "num_retries", "num_refused", "refusal", "errors")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    text: str
    files: _containers.ScalarMap[str, bytes]
    num_retries: int
    num_refused: int
    refusal: str
    errors: str
    def __init__(self, exit_code: _Optional[int] = ..., text: _Optional[str] = ..., files: _Optional[_Mapping[str, bytes]] = ..., num_retries: _Optional[int] = ..., num_refused: _Optional[int] = ..., refusal: _Optional[str] = ..., errors: _Optional[str] = ...) -> None: ...

class PlayResponse(_message.Message):
    __slots__ = ("call", "end", "failure")
    CALL_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    call: AgentCall
    end: AgentEnd
    failure: _environment_pb2.EnvironmentFailure
    def __init__(self, call: _Optional[_Union[AgentCall, _Mapping]] = ..., end: _Optional[_Union[AgentEnd, _Mapping]] = ..., failure: _Optional[_Union[_environment_pb2.EnvironmentFailure, _Mapping]] = ...) -> None: ...
