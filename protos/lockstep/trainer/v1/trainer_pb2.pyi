from lockstep.types.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_POLICY: _ClassVar[Role]
    ROLE_REFERENCE: _ClassVar[Role]
    ROLE_CRITIC: _ClassVar[Role]
    ROLE_TEACHER: _ClassVar[Role]

class ModelPart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_PART_UNSPECIFIED: _ClassVar[ModelPart]
    MODEL_PART_OPTIMIZER: _ClassVar[ModelPart]
    MODEL_PART_PARAMETERS: _ClassVar[ModelPart]
ROLE_UNSPECIFIED: Role
ROLE_POLICY: Role
ROLE_REFERENCE: Role
ROLE_CRITIC: Role
ROLE_TEACHER: Role
MODEL_PART_UNSPECIFIED: ModelPart
MODEL_PART_OPTIMIZER: ModelPart
MODEL_PART_PARAMETERS: ModelPart

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("info", "stamp", "num_ranks")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    info: _types_pb2.ServiceInfo
    stamp: _types_pb2.PolicyStamp
    num_ranks: int
    def __init__(self, info: _Optional[_Union[_types_pb2.ServiceInfo, _Mapping]] = ..., stamp: _Optional[_Union[_types_pb2.PolicyStamp, _Mapping]] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class OpenRunRequest(_message.Message):
    __slots__ = ("run_id", "config_json", "model_path", "checkpoint_path", "seed", "bucket_bytes", "role")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PATH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    config_json: str
    model_path: str
    checkpoint_path: str
    seed: int
    bucket_bytes: int
    role: Role
    def __init__(self, run_id: _Optional[str] = ..., config_json: _Optional[str] = ..., model_path: _Optional[str] = ..., checkpoint_path: _Optional[str] = ..., seed: _Optional[int] = ..., bucket_bytes: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class OpenRunResponse(_message.Message):
    __slots__ = ("version", "last_batch_id", "model_card", "plan", "store_host", "store_port", "weight_backend", "num_ranks", "store_secret")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_CARD_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BACKEND_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    STORE_SECRET_FIELD_NUMBER: _ClassVar[int]
    version: int
    last_batch_id: str
    model_card: _types_pb2.ModelCard
    plan: _types_pb2.WeightPlan
    store_host: str
    store_port: int
    weight_backend: str
    num_ranks: int
    store_secret: bytes
    def __init__(self, version: _Optional[int] = ..., last_batch_id: _Optional[str] = ..., model_card: _Optional[_Union[_types_pb2.ModelCard, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.WeightPlan, _Mapping]] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., weight_backend: _Optional[str] = ..., num_ranks: _Optional[int] = ..., store_secret: _Optional[bytes] = ...) -> None: ...

class CloseRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class CloseRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForwardHeader(_message.Message):
    __slots__ = ("role", "temperature", "top_k", "vocab_size")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    role: Role
    temperature: float
    top_k: int
    vocab_size: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("header", "frame", "sha256")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    header: ForwardHeader
    frame: bytes
    sha256: bytes
    def __init__(self, header: _Optional[_Union[ForwardHeader, _Mapping]] = ..., frame: _Optional[bytes] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("frame", "sha256")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    sha256: bytes
    def __init__(self, frame: _Optional[bytes] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class TrainHeader(_message.Message):
    __slots__ = ("expected_stamp", "batch_id", "temperature", "role", "critic_version", "drawn_stamp", "groups_per_minibatch", "tokens_per_block", "block_growth")
    EXPECTED_STAMP_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CRITIC_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAWN_STAMP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_MINIBATCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GROWTH_FIELD_NUMBER: _ClassVar[int]
    expected_stamp: _types_pb2.PolicyStamp
    batch_id: str
    temperature: float
    role: Role
    critic_version: int
    drawn_stamp: _types_pb2.PolicyStamp
    groups_per_minibatch: int
    tokens_per_block: int
    block_growth: int
    def __init__(self, expected_stamp: _Optional[_Union[_types_pb2.PolicyStamp, _Mapping]] = ..., batch_id: _Optional[str] = ..., temperature: _Optional[float] = ..., role: _Optional[_Union[Role, str]] = ..., critic_version: _Optional[int] = ..., drawn_stamp: _Optional[_Union[_types_pb2.PolicyStamp, _Mapping]] = ..., groups_per_minibatch: _Optional[int] = ..., tokens_per_block: _Optional[int] = ..., block_growth: _Optional[int] = ...) -> None: ...

class TrainBlock(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    def __init__(self, sha256: _Optional[bytes] = ...) -> None: ...

class TrainCommit(_message.Message):
    __slots__ = ("sha256", "num_samples", "num_tokens")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    num_samples: int
    num_tokens: int
    def __init__(self, sha256: _Optional[bytes] = ..., num_samples: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TrainRequest(_message.Message):
    __slots__ = ("header", "frame", "block", "commit")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    header: TrainHeader
    frame: bytes
    block: TrainBlock
    commit: TrainCommit
    def __init__(self, header: _Optional[_Union[TrainHeader, _Mapping]] = ..., frame: _Optional[bytes] = ..., block: _Optional[_Union[TrainBlock, _Mapping]] = ..., commit: _Optional[_Union[TrainCommit, _Mapping]] = ...) -> None: ...

class TrainResponse(_message.Message):
    __slots__ = ("version", "metrics", "replayed", "samples_sha256")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_SHA256_FIELD_NUMBER: _ClassVar[int]
    version: int
    metrics: _containers.ScalarMap[str, float]
    replayed: bool
    samples_sha256: bytes
    def __init__(self, version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., replayed: bool = ..., samples_sha256: _Optional[bytes] = ...) -> None: ...

class JoinWeightGroupRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: _types_pb2.WeightGroup
    def __init__(self, group: _Optional[_Union[_types_pb2.WeightGroup, _Mapping]] = ...) -> None: ...

class JoinWeightGroupResponse(_message.Message):
    __slots__ = ("plan_digest",)
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    plan_digest: str
    def __init__(self, plan_digest: _Optional[str] = ...) -> None: ...

class SendWeightsRequest(_message.Message):
    __slots__ = ("epoch", "version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class SendWeightsResponse(_message.Message):
    __slots__ = ("stamp", "num_bytes", "duration_s", "cost")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    stamp: _types_pb2.PolicyStamp
    num_bytes: int
    duration_s: float
    cost: _types_pb2.PublicationCost
    def __init__(self, stamp: _Optional[_Union[_types_pb2.PolicyStamp, _Mapping]] = ..., num_bytes: _Optional[int] = ..., duration_s: _Optional[float] = ..., cost: _Optional[_Union[_types_pb2.PublicationCost, _Mapping]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("path", "version", "role")
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    path: str
    version: int
    role: Role
    def __init__(self, path: _Optional[str] = ..., version: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("num_bytes", "manifest_digest")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    manifest_digest: str
    def __init__(self, num_bytes: _Optional[int] = ..., manifest_digest: _Optional[str] = ...) -> None: ...

class ExportHuggingFaceRequest(_message.Message):
    __slots__ = ("path", "model_card")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_CARD_FIELD_NUMBER: _ClassVar[int]
    path: str
    model_card: _types_pb2.ModelCard
    def __init__(self, path: _Optional[str] = ..., model_card: _Optional[_Union[_types_pb2.ModelCard, _Mapping]] = ...) -> None: ...

class ExportHuggingFaceResponse(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class ReleaseMemoryRequest(_message.Message):
    __slots__ = ("parts", "roles", "least_free_bytes")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    LEAST_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedScalarFieldContainer[ModelPart]
    roles: _containers.RepeatedScalarFieldContainer[Role]
    least_free_bytes: int
    def __init__(self, parts: _Optional[_Iterable[_Union[ModelPart, str]]] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., least_free_bytes: _Optional[int] = ...) -> None: ...

class ReleaseMemoryResponse(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[_types_pb2.DeviceMemory]
    def __init__(self, ranks: _Optional[_Iterable[_Union[_types_pb2.DeviceMemory, _Mapping]]] = ...) -> None: ...

class AcquireMemoryRequest(_message.Message):
    __slots__ = ("parts", "roles")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedScalarFieldContainer[ModelPart]
    roles: _containers.RepeatedScalarFieldContainer[Role]
    def __init__(self, parts: _Optional[_Iterable[_Union[ModelPart, str]]] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ...) -> None: ...

class AcquireMemoryResponse(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[_types_pb2.DeviceMemory]
    def __init__(self, ranks: _Optional[_Iterable[_Union[_types_pb2.DeviceMemory, _Mapping]]] = ...) -> None: ...

class SendTestBroadcastRequest(_message.Message):
    __slots__ = ("num_receivers", "host", "timeout_s")
    NUM_RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    num_receivers: int
    host: str
    timeout_s: float
    def __init__(self, num_receivers: _Optional[int] = ..., host: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class SendTestBroadcastResponse(_message.Message):
    __slots__ = ("group", "outcome")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    group: _types_pb2.WeightGroup
    outcome: _types_pb2.TestBroadcast
    def __init__(self, group: _Optional[_Union[_types_pb2.WeightGroup, _Mapping]] = ..., outcome: _Optional[_Union[_types_pb2.TestBroadcast, _Mapping]] = ...) -> None: ...
