"""Defines the errors that cross process boundaries: exceptions here, gRPC statuses with a typed reason on the wire.

Each class has one gRPC code; `reason` identifies the case by a word that programs can compare and people can search
for. Both are sent as `google.rpc.ErrorInfo(reason, domain="lockstep", metadata)`, so that the caller raises the same
class that the callee raised.
"""

import re
from enum import StrEnum

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "lockstep"
# A status is sent in HTTP/2 headers, which are rejected as a whole if they are too large. The headers have room for a
# message and a few metadata values of this size, percent-encoded and in base64.
_MAX_TEXT_BYTES = 4 << 10
MAX_HEADER_BYTES = 64 << 10


class Reason(StrEnum):
    """What went wrong, one word per case."""

    INVALID_CONFIG = "INVALID_CONFIG"
    INVALID_INPUT = "INVALID_INPUT"
    UNSUPPORTED_VERSION = "UNSUPPORTED_VERSION"
    NOT_FOUND = "NOT_FOUND"
    # Authentication and authorization
    BAD_CERTIFICATE = "BAD_CERTIFICATE"
    WRONG_ROLE = "WRONG_ROLE"
    # The on-policy contract
    STALE_STAMP = "STALE_STAMP"
    FUTURE_STAMP = "FUTURE_STAMP"
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    QUANTIZED_MISMATCH = "QUANTIZED_MISMATCH"
    UNPUBLISHED = "UNPUBLISHED"
    NOT_SERVING = "NOT_SERVING"
    ASLEEP = "ASLEEP"
    PROMPT_MISMATCH = "PROMPT_MISMATCH"
    REPLAYED_BATCH = "REPLAYED_BATCH"
    LOGPROB_DIFF = "LOGPROB_DIFF"
    TOO_STALE = "TOO_STALE"
    LOW_ESS = "LOW_ESS"
    NONFINITE_GRADIENT = "NONFINITE_GRADIENT"
    # The weight group
    OLD_EPOCH = "OLD_EPOCH"
    NOT_JOINED = "NOT_JOINED"
    PLAN_MISMATCH = "PLAN_MISMATCH"
    EPOCH_ABORTED = "EPOCH_ABORTED"
    # State and lifecycle of a service
    RUN_NOT_OPEN = "RUN_NOT_OPEN"
    MEMORY_RELEASED = "MEMORY_RELEASED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    RUN_REPLACED = "RUN_REPLACED"
    WRONG_STATE = "WRONG_STATE"
    STREAM_ENDED = "STREAM_ENDED"
    ENGINE_DEAD = "ENGINE_DEAD"
    RANK_FAILED = "RANK_FAILED"
    REWARD_FAILED = "REWARD_FAILED"
    SCORER_CHANGED = "SCORER_CHANGED"
    ENVIRONMENT_FAILED = "ENVIRONMENT_FAILED"
    EPISODE_NOT_OPEN = "EPISODE_NOT_OPEN"
    TOO_FEW_GROUPS = "TOO_FEW_GROUPS"
    NO_REPLICA = "NO_REPLICA"
    SERVICE_DIED = "SERVICE_DIED"
    UNREACHABLE = "UNREACHABLE"
    DEADLINE = "DEADLINE"
    OVERLOADED = "OVERLOADED"
    STORAGE_FAILED = "STORAGE_FAILED"
    CORRUPT_CHECKPOINT = "CORRUPT_CHECKPOINT"
    CORRUPT_TRANSFER = "CORRUPT_TRANSFER"
    INTERNAL = "INTERNAL"


class LockstepError(Exception):
    """The base of all errors. `metadata` has strings that a program or a person needs to act on it."""

    code = grpc.StatusCode.INTERNAL
    default_reason = Reason.INTERNAL

    def __init__(self, message: str, *, reason: Reason | None = None, **metadata: object):
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidInput(LockstepError, ValueError):
    """The caller's input is invalid. The metadata key `field` names the input to change."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = Reason.INVALID_INPUT


class NotFound(LockstepError, LookupError):
    """A file, checkpoint or name does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = Reason.NOT_FOUND


class Unauthenticated(LockstepError):
    """Client and server do not accept each other's certificates."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = Reason.BAD_CERTIFICATE


class PermissionDenied(LockstepError):
    """The caller's certificate is valid, but its identity may not make this call."""

    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = Reason.WRONG_ROLE


class PreconditionFailed(LockstepError):
    """The request is valid, but the state or the policy stamp is wrong. Never retry it unchanged."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = Reason.WRONG_STATE


class Unavailable(LockstepError):
    """The service, or something that it needs, is gone. Idempotent calls may be retried on another replica."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = Reason.UNREACHABLE


class Overloaded(LockstepError):
    """A queue, the KV cache or a device's memory is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = Reason.OVERLOADED


class Aborted(LockstepError):
    """An epoch of the weight group was abandoned. Form the next one."""

    code = grpc.StatusCode.ABORTED
    default_reason = Reason.EPOCH_ABORTED


class DeadlineExceeded(LockstepError, TimeoutError):
    """The call was not answered before its deadline."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = Reason.DEADLINE


class DataLoss(LockstepError):
    """Bytes that were read or received are not the ones that were written or sent."""

    code = grpc.StatusCode.DATA_LOSS
    default_reason = Reason.CORRUPT_CHECKPOINT


class InternalError(LockstepError):
    """There is a bug or a broken device. The message says where it happened."""


ERROR_CLASSES: tuple[type[LockstepError], ...] = tuple(LockstepError.__subclasses__())
_CLASS_OF_CODE = {cls.code: cls for cls in ERROR_CLASSES}


def described(error: BaseException) -> tuple[str, str]:
    """Returns the word of an error's reason and its message; an untyped error is INTERNAL."""
    if isinstance(error, LockstepError):
        return error.reason.value, error.message
    return Reason.INTERNAL.value, f"{type(error).__name__}: {error}"


def to_status(error: LockstepError) -> grpc.Status:
    """Returns the gRPC status that carries `error`, for `context.abort_with_status`."""
    # Keep the start of the message, which says what happened, and the end of a traceback, which says where.
    message = error.message.encode(errors="replace")[:_MAX_TEXT_BYTES].decode(errors="ignore")
    metadata = {
        key: value.encode(errors="replace")[-_MAX_TEXT_BYTES:].decode(errors="ignore")
        for key, value in error.metadata.items()
    }
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    code = code_pb2.Code.Value(error.code.name)
    return rpc_status.to_status(status_pb2.Status(code=code, message=message, details=[detail]))


def from_rpc_error(error: grpc.aio.AioRpcError, *, target: str) -> LockstepError:
    """Returns the exception that the callee raised, or the nearest class if the status came from gRPC itself."""
    code, message = error.code(), error.details() or error.code().name
    if code is grpc.StatusCode.CANCELLED:  # the server went away in the middle of the call
        code = grpc.StatusCode.UNAVAILABLE
    cls = _CLASS_OF_CODE.get(code, InternalError)
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in Reason.__members__:
            return cls(message, reason=Reason(info.reason), **info.metadata)
    if code is grpc.StatusCode.INTERNAL:  # the service's own bugs returned above; gRPC itself says this of broken bytes
        return DataLoss(
            f"{target}: the request or its answer was changed on the way: {message}",
            reason=Reason.CORRUPT_TRANSFER,
            target=target,
        )
    return cls(f"{target}: {message}", target=target)


def without_passwords(text: str) -> str:
    """Returns a text, such as a config or an error of a library, without the user and password of the URLs in it."""
    return re.sub(r"(?<=://)[^/\s'\"]*@", "", text)


def counted(number: int, noun: str) -> str:
    """Returns `1 step` or `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
