"""Reads the fields of a message that the history of calls keeps: ids, versions and hashes, never texts, tokens or
secrets."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_TEXTS = {"run_id", "batch_id", "last_batch_id", "prompt_id", "episode_id", "path", "checkpoint_path"}
_HASHES = {"digest", "plan_digest", "manifest_digest", "sha256", "samples_sha256"}
_NUMBERS = {"version", "critic_version", "epoch", "world_size", "turn", "num_workers", "role", "part"}
_FLAGS = {"replayed", "done"}
_STAMPS = {"expected_stamp", "drawn_stamp", "stamp"}
_PARTS = {"header", "block", "commit", "group"}
_KEPT = _TEXTS | _HASHES | _NUMBERS | _FLAGS | _STAMPS | _PARTS | {"prompts", "metrics", "scores"}
# Hexadecimal digits of a hash: 128 bits, as many as those of the weights have.
_DIGITS = 32


def ids_of(message: Message) -> dict[str, Any]:
    """Returns the kept fields of `message`, as JSON values: a stamp is [version, digest], metrics and scores are
    their hashes."""
    found: dict[str, Any] = {}
    for name, has_presence, read in _readers(message.DESCRIPTOR):
        if has_presence and not message.HasField(name):
            continue
        value = read(getattr(message, name))
        if value != "" and value is not False:
            found[name] = value
    return found


@functools.cache
def _readers(kind: Descriptor) -> list[tuple[str, bool, Callable[[Any], Any]]]:
    """Returns, for each field of `kind` that is kept, its name, whether it can be absent, and what reads its value."""
    return [(field.name, field.has_presence, _reader(field)) for field in kind.fields if field.name in _KEPT]


def _reader(field: FieldDescriptor) -> Callable[[Any], Any]:
    name = field.name
    if name in _STAMPS:
        return lambda stamp: [stamp.version, stamp.digest]
    if name in _PARTS:
        return ids_of
    if name == "prompts":
        return lambda prompts: [prompt.prompt_id for prompt in prompts]
    if name == "metrics":
        return _metrics_hash
    if name == "scores":
        return lambda scores: scores_hashes((score.reward, score.components) for score in scores)
    return _short if name in _HASHES else lambda value: value


def _short(value: str | bytes) -> str:
    return (value if isinstance(value, str) else value.hex())[:_DIGITS]


def scores_hashes(scores: Iterable[tuple[float, Mapping[str, float]]]) -> list[str]:
    """Returns the hash of the components, by name, and that of the rewards, of the samples of a group in order."""
    rewards, components = zip(*scores, strict=True) if (scores := list(scores)) else ((), ())
    return [_hash([sorted(one.items()) for one in components]), _hash(list(rewards))]


def _metrics_hash(metrics: Any) -> str:
    return _hash(sorted(metrics.items()))


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:_DIGITS]
