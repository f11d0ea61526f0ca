from lockstep.types.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnginePart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_PART_UNSPECIFIED: _ClassVar[EnginePart]
    ENGINE_PART_WEIGHTS: _ClassVar[EnginePart]
    ENGINE_PART_KV_CACHE: _ClassVar[EnginePart]
ENGINE_PART_UNSPECIFIED: EnginePart
ENGINE_PART_WEIGHTS: EnginePart
ENGINE_PART_KV_CACHE: EnginePart

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("info", "stamp", "samples_in_flight", "num_workers", "max_samples")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    info: _types_pb2.ServiceInfo
    stamp: _types_pb2.PolicyStamp
    samples_in_flight: int
    num_workers: int
    max_samples: int
    def __init__(self, info: _Optional[_Union[_types_pb2.ServiceInfo, _Mapping]] = ..., stamp: _Optional[_Union[_types_pb2.PolicyStamp, _Mapping]] = ..., samples_in_flight: _Optional[int] = ..., num_workers: _Optional[int] = ..., max_samples: _Optional[int] = ...) -> None: ...

class OpenRunRequest(_message.Message):
    __slots__ = ("run_id", "config_json", "model_card", "seed", "adapter_rank", "can_sleep", "return_routed_experts")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    MODEL_CARD_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    CAN_SLEEP_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    config_json: str
    model_card: _types_pb2.ModelCard
    seed: int
    adapter_rank: int
    can_sleep: bool
    return_routed_experts: bool
    def __init__(self, run_id: _Optional[str] = ..., config_json: _Optional[str] = ..., model_card: _Optional[_Union[_types_pb2.ModelCard, _Mapping]] = ..., seed: _Optional[int] = ..., adapter_rank: _Optional[int] = ..., can_sleep: bool = ..., return_routed_experts: bool = ...) -> None: ...

class OpenRunResponse(_message.Message):
    __slots__ = ("num_workers", "max_samples", "returns_routed_experts")
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RETURNS_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    num_workers: int
    max_samples: int
    returns_routed_experts: bool
    def __init__(self, num_workers: _Optional[int] = ..., max_samples: _Optional[int] = ..., returns_routed_experts: bool = ...) -> None: ...

class CloseRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class CloseRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("prompt_id", "tokens", "seeds")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    seeds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., seeds: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("expected_stamp", "prompts", "sampling", "report_unfinished")
    EXPECTED_STAMP_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REPORT_UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    expected_stamp: _types_pb2.PolicyStamp
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    sampling: _types_pb2.SamplingParams
    report_unfinished: bool
    def __init__(self, expected_stamp: _Optional[_Union[_types_pb2.PolicyStamp, _Mapping]] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., report_unfinished: bool = ...) -> None: ...

class CompletionPart(_message.Message):
    __slots__ = ("completion", "num_shared_bytes", "data")
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    completion: int
    num_shared_bytes: int
    data: bytes
    def __init__(self, completion: _Optional[int] = ..., num_shared_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("num_drafts", "num_drafted", "num_accepted", "seconds")
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_drafts: int
    num_drafted: int
    num_accepted: int
    seconds: float
    def __init__(self, num_drafts: _Optional[int] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("prompt_id", "completions", "stamp", "prompt_num_tokens", "prompt_sha256", "num_cached_tokens", "sha256", "routed_experts", "unfinished", "drafts", "sampling_mask")
    class UnfinishedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASK_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    completions: _containers.RepeatedCompositeFieldContainer[_types_pb2.Completion]
    stamp: _types_pb2.PolicyStamp
    prompt_num_tokens: int
    prompt_sha256: str
    num_cached_tokens: int
    sha256: bytes
    routed_experts: _containers.RepeatedCompositeFieldContainer[CompletionPart]
    unfinished: _containers.ScalarMap[str, int]
    drafts: Drafts
    sampling_mask: _containers.RepeatedCompositeFieldContainer[CompletionPart]
    def __init__(self, prompt_id: _Optional[str] = ..., completions: _Optional[_Iterable[_Union[_types_pb2.Completion, _Mapping]]] = ..., stamp: _Optional[_Union[_types_pb2.PolicyStamp, _Mapping]] = ..., prompt_num_tokens: _Optional[int] = ..., prompt_sha256: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., sha256: _Optional[bytes] = ..., routed_experts: _Optional[_Iterable[_Union[CompletionPart, _Mapping]]] = ..., unfinished: _Optional[_Mapping[str, int]] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ..., sampling_mask: _Optional[_Iterable[_Union[CompletionPart, _Mapping]]] = ...) -> None: ...

class JoinWeightGroupRequest(_message.Message):
    __slots__ = ("group", "base_rank", "plan")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BASE_RANK_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    group: _types_pb2.WeightGroup
    base_rank: int
    plan: _types_pb2.WeightPlan
    def __init__(self, group: _Optional[_Union[_types_pb2.WeightGroup, _Mapping]] = ..., base_rank: _Optional[int] = ..., plan: _Optional[_Union[_types_pb2.WeightPlan, _Mapping]] = ...) -> None: ...

class JoinWeightGroupResponse(_message.Message):
    __slots__ = ("plan_digest",)
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    plan_digest: str
    def __init__(self, plan_digest: _Optional[str] = ...) -> None: ...

class ReceiveWeightsRequest(_message.Message):
    __slots__ = ("epoch", "version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class ReceiveWeightsResponse(_message.Message):
    __slots__ = ("digest", "num_bytes", "duration_s", "wait_s", "cost", "quantized_digest")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    QUANTIZED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    num_bytes: int
    duration_s: float
    wait_s: float
    cost: _types_pb2.PublicationCost
    quantized_digest: str
    def __init__(self, digest: _Optional[str] = ..., num_bytes: _Optional[int] = ..., duration_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., cost: _Optional[_Union[_types_pb2.PublicationCost, _Mapping]] = ..., quantized_digest: _Optional[str] = ...) -> None: ...

class CommitWeightsRequest(_message.Message):
    __slots__ = ("stamp",)
    STAMP_FIELD_NUMBER: _ClassVar[int]
    stamp: _types_pb2.PolicyStamp
    def __init__(self, stamp: _Optional[_Union[_types_pb2.PolicyStamp, _Mapping]] = ...) -> None: ...

class CommitWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_types_pb2.DeviceMemory]
    def __init__(self, workers: _Optional[_Iterable[_Union[_types_pb2.DeviceMemory, _Mapping]]] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: EnginePart
    def __init__(self, part: _Optional[_Union[EnginePart, str]] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_types_pb2.DeviceMemory]
    def __init__(self, workers: _Optional[_Iterable[_Union[_types_pb2.DeviceMemory, _Mapping]]] = ...) -> None: ...

class ReceiveTestBroadcastRequest(_message.Message):
    __slots__ = ("group", "rank")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    group: _types_pb2.WeightGroup
    rank: int
    def __init__(self, group: _Optional[_Union[_types_pb2.WeightGroup, _Mapping]] = ..., rank: _Optional[int] = ...) -> None: ...

class ReceiveTestBroadcastResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: _types_pb2.TestBroadcast
    def __init__(self, outcome: _Optional[_Union[_types_pb2.TestBroadcast, _Mapping]] = ...) -> None: ...
