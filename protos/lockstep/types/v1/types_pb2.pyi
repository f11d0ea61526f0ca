from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TURN_LIMIT: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TURN_LIMIT: FinishReason

class PolicyStamp(_message.Message):
    __slots__ = ("version", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("files",)
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.ScalarMap[str, bytes]
    def __init__(self, files: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "max_tokens", "stop_token_ids", "stop", "top_p", "top_k", "min_p", "return_routed_experts", "return_sampling_mask", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    RETURN_SAMPLING_MASK_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    top_p: float
    top_k: int
    min_p: float
    return_routed_experts: bool
    return_sampling_mask: bool
    min_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, temperature: _Optional[float] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., return_routed_experts: bool = ..., return_sampling_mask: bool = ..., min_tokens: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("tokens", "logprobs", "finish_reason", "seed")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: FinishReason
    seed: int
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., seed: _Optional[int] = ...) -> None: ...

class WeightGroup(_message.Message):
    __slots__ = ("run_id", "epoch", "store_host", "store_port", "world_size", "backend", "timeout_s", "store_secret", "num_trainer_ranks")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    STORE_SECRET_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINER_RANKS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    store_host: str
    store_port: int
    world_size: int
    backend: str
    timeout_s: float
    store_secret: bytes
    num_trainer_ranks: int
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ..., timeout_s: _Optional[float] = ..., store_secret: _Optional[bytes] = ..., num_trainer_ranks: _Optional[int] = ...) -> None: ...

class TestBroadcast(_message.Message):
    __slots__ = ("digest", "num_bytes", "duration_s", "route")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    num_bytes: int
    duration_s: float
    route: str
    def __init__(self, digest: _Optional[str] = ..., num_bytes: _Optional[int] = ..., duration_s: _Optional[float] = ..., route: _Optional[str] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class SenderSlot(_message.Message):
    __slots__ = ("sender", "num_tensors")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    NUM_TENSORS_FIELD_NUMBER: _ClassVar[int]
    sender: int
    num_tensors: int
    def __init__(self, sender: _Optional[int] = ..., num_tensors: _Optional[int] = ...) -> None: ...

class PublicationCost(_message.Message):
    __slots__ = ("digest_s", "extra_bytes")
    DIGEST_S_FIELD_NUMBER: _ClassVar[int]
    EXTRA_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest_s: float
    extra_bytes: int
    def __init__(self, digest_s: _Optional[float] = ..., extra_bytes: _Optional[int] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("device_uuid", "freed_bytes", "taken_bytes", "resident_bytes", "device_total_bytes", "device_free_bytes", "host_bytes", "duration_s")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    device_uuid: str
    freed_bytes: int
    taken_bytes: int
    resident_bytes: int
    device_total_bytes: int
    device_free_bytes: int
    host_bytes: int
    duration_s: float
    def __init__(self, device_uuid: _Optional[str] = ..., freed_bytes: _Optional[int] = ..., taken_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., device_total_bytes: _Optional[int] = ..., device_free_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., duration_s: _Optional[float] = ...) -> None: ...

class WeightPlan(_message.Message):
    __slots__ = ("tensors", "bucket_bytes", "num_base_tensors", "adapter_config_json", "num_senders", "slots")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BASE_TENSORS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    NUM_SENDERS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    bucket_bytes: int
    num_base_tensors: int
    adapter_config_json: str
    num_senders: int
    slots: _containers.RepeatedCompositeFieldContainer[SenderSlot]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., bucket_bytes: _Optional[int] = ..., num_base_tensors: _Optional[int] = ..., adapter_config_json: _Optional[str] = ..., num_senders: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[SenderSlot, _Mapping]]] = ...) -> None: ...

class ServiceInfo(_message.Message):
    __slots__ = ("service", "version", "incarnation", "state", "run_id", "config_digest", "libraries", "time_ns")
    class LibrariesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LIBRARIES_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    service: str
    version: str
    incarnation: str
    state: str
    run_id: str
    config_digest: str
    libraries: _containers.ScalarMap[str, str]
    time_ns: int
    def __init__(self, service: _Optional[str] = ..., version: _Optional[str] = ..., incarnation: _Optional[str] = ..., state: _Optional[str] = ..., run_id: _Optional[str] = ..., config_digest: _Optional[str] = ..., libraries: _Optional[_Mapping[str, str]] = ..., time_ns: _Optional[int] = ...) -> None: ...
