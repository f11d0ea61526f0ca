from lockstep.types.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_STARTING: _ClassVar[RunState]
    RUN_STATE_RUNNING: _ClassVar[RunState]
    RUN_STATE_STOPPING: _ClassVar[RunState]
    RUN_STATE_FINISHED: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]
    RUN_STATE_STOPPED: _ClassVar[RunState]
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_STARTING: RunState
RUN_STATE_RUNNING: RunState
RUN_STATE_STOPPING: RunState
RUN_STATE_FINISHED: RunState
RUN_STATE_FAILED: RunState
RUN_STATE_STOPPED: RunState

class Run(_message.Message):
    __slots__ = ("name", "run_id", "state", "phase", "version", "num_steps", "run_dir", "error", "export_path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EXPORT_PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    run_id: str
    state: RunState
    phase: str
    version: int
    num_steps: int
    run_dir: str
    error: str
    export_path: str
    def __init__(self, name: _Optional[str] = ..., run_id: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., phase: _Optional[str] = ..., version: _Optional[int] = ..., num_steps: _Optional[int] = ..., run_dir: _Optional[str] = ..., error: _Optional[str] = ..., export_path: _Optional[str] = ...) -> None: ...

class ServiceAddresses(_message.Message):
    __slots__ = ("rollout", "reward", "trainer", "reference", "critic", "teacher")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    CRITIC_FIELD_NUMBER: _ClassVar[int]
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    rollout: _containers.RepeatedScalarFieldContainer[str]
    reward: _containers.RepeatedScalarFieldContainer[str]
    trainer: str
    reference: str
    critic: str
    teacher: str
    def __init__(self, rollout: _Optional[_Iterable[str]] = ..., reward: _Optional[_Iterable[str]] = ..., trainer: _Optional[str] = ..., reference: _Optional[str] = ..., critic: _Optional[str] = ..., teacher: _Optional[str] = ...) -> None: ...

class Numbers(_message.Message):
    __slots__ = ("version", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    version: int
    values: _containers.ScalarMap[str, float]
    def __init__(self, version: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("info", "runs_dir", "num_running")
    INFO_FIELD_NUMBER: _ClassVar[int]
    RUNS_DIR_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    info: _types_pb2.ServiceInfo
    runs_dir: str
    num_running: int
    def __init__(self, info: _Optional[_Union[_types_pb2.ServiceInfo, _Mapping]] = ..., runs_dir: _Optional[str] = ..., num_running: _Optional[int] = ...) -> None: ...

class StartRunRequest(_message.Message):
    __slots__ = ("config_json", "addresses")
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    config_json: str
    addresses: ServiceAddresses
    def __init__(self, config_json: _Optional[str] = ..., addresses: _Optional[_Union[ServiceAddresses, _Mapping]] = ...) -> None: ...

class StartRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ...) -> None: ...

class WatchRunRequest(_message.Message):
    __slots__ = ("name", "after_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    after_version: int
    def __init__(self, name: _Optional[str] = ..., after_version: _Optional[int] = ...) -> None: ...

class WatchRunResponse(_message.Message):
    __slots__ = ("run", "step", "evaluation", "conversation")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    run: Run
    step: Numbers
    evaluation: Numbers
    conversation: Conversation
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ..., step: _Optional[_Union[Numbers, _Mapping]] = ..., evaluation: _Optional[_Union[Numbers, _Mapping]] = ..., conversation: _Optional[_Union[Conversation, _Mapping]] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("prompt_id", "sample", "prompt", "parts", "reward", "finish_reason", "answer")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    sample: int
    prompt: str
    parts: _containers.RepeatedCompositeFieldContainer[ConversationPart]
    reward: float
    finish_reason: str
    answer: str
    def __init__(self, prompt_id: _Optional[str] = ..., sample: _Optional[int] = ..., prompt: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ConversationPart, _Mapping]]] = ..., reward: _Optional[float] = ..., finish_reason: _Optional[str] = ..., answer: _Optional[str] = ...) -> None: ...

class ConversationPart(_message.Message):
    __slots__ = ("text", "reward")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    text: str
    reward: float
    def __init__(self, text: _Optional[str] = ..., reward: _Optional[float] = ...) -> None: ...

class StopRunRequest(_message.Message):
    __slots__ = ("name", "now")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    now: bool
    def __init__(self, name: _Optional[str] = ..., now: bool = ...) -> None: ...

class StopRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("address", "version", "is_wanted", "note", "is_unused")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_WANTED_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    IS_UNUSED_FIELD_NUMBER: _ClassVar[int]
    address: str
    version: int
    is_wanted: bool
    note: str
    is_unused: bool
    def __init__(self, address: _Optional[str] = ..., version: _Optional[int] = ..., is_wanted: bool = ..., note: _Optional[str] = ..., is_unused: bool = ...) -> None: ...

class ListReplicasRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListReplicasResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class ChangeReplicasRequest(_message.Message):
    __slots__ = ("name", "add", "remove")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    add: _containers.RepeatedScalarFieldContainer[str]
    remove: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., add: _Optional[_Iterable[str]] = ..., remove: _Optional[_Iterable[str]] = ...) -> None: ...

class ChangeReplicasResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class ReadLogRequest(_message.Message):
    __slots__ = ("name", "service", "offset", "follow")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    service: str
    offset: int
    follow: bool
    def __init__(self, name: _Optional[str] = ..., service: _Optional[str] = ..., offset: _Optional[int] = ..., follow: bool = ...) -> None: ...

class ReadLogResponse(_message.Message):
    __slots__ = ("data", "next_offset")
    DATA_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    next_offset: int
    def __init__(self, data: _Optional[bytes] = ..., next_offset: _Optional[int] = ...) -> None: ...
