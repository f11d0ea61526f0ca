"""Checks rows of a ledger as they are read, so that a damaged row is named before anything relies on it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from services.common.errors import DataLoss


def _is_object(text: str) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError("not a JSON object")
    return text


class _Body(BaseModel):
    """Has the fields of a decision that readers rely on; later releases may add others."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Opened(_Body):
    run_id: str
    config: Annotated[str, AfterValidator(_is_object)]
    checkpoint: str
    versions: dict[str, str] = {}


class _Published(_Body):
    digest: str
    received: dict[str, str] = {}


class _Selected(_Body):
    metrics: dict[str, float] = {}


class _OfData(_Body):
    dataset: str


class _Collected(_OfData):
    sha256: str
    digest: str
    drawn: int | None = None
    num_prompts: int = 1
    kl: dict[str, float] | None = None


class _EvalSamples(_Body):
    file: str
    sha256: str


class _Saved(_Body):
    path: str
    manifest_digest: str


class _OfPath(_Body):
    path: str


class _Failed(_Body):
    reason: str
    message: str


class _Stopped(_Body):
    metric: str
    best_version: int
    best_value: float


_METRICS = TypeAdapter(dict[str, float])
_BODIES: Mapping[str, TypeAdapter[Any]] = {
    "opened": TypeAdapter(_Opened),
    "published": TypeAdapter(_Published),
    "selected": TypeAdapter(_Selected),
    "collected": TypeAdapter(_Collected),
    "finished": _METRICS,
    "eval_samples": TypeAdapter(_EvalSamples),
    "evaluated": _METRICS,
    "stopped": TypeAdapter(_Stopped),
    "exported": TypeAdapter(_OfPath),
    "saved": TypeAdapter(_Saved),
    "saved_critic": TypeAdapter(_Saved),
    "failed": TypeAdapter(_Failed),
    "deleted": TypeAdapter(_OfPath),
}
_OF_SFT = TypeAdapter(_OfData)
_WITHOUT_VERSION = {"opened", "epoch", "deleted", "failed"}
_ANY = TypeAdapter(_Body)


def checked_row(path: Path, seq: int, kind: str, version: object, text: object) -> dict[str, Any]:
    """Returns the body of a row of the ledger at `path`, which is the JSON `text`.

    Raises:
        DataLoss: It is no JSON object, lacks a field or has one of another type, or its version is missing.
    """
    is_sft = kind == "collected" and version is None
    needs_version = kind in _BODIES.keys() - _WITHOUT_VERSION and not is_sft
    with reading(f"{path}: row {seq} of the ledger, {kind},"):
        if not isinstance(version, int) and (version is not None or needs_version):
            raise ValueError(f"its version is {version!r}")
        body = json.loads(text)  # type: ignore[arg-type]  # a damaged row may have another type
        (_OF_SFT if is_sft else _BODIES.get(kind, _ANY)).validate_python(body)
        return body


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns errors of code that reads `what`, a part of a run's record, into DataLoss: it is not what was written."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise DataLoss(f"{what} is damaged: {field}: {first['msg']}" if field else f"{what} is damaged") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataLoss(f"{what} is damaged: {type(error).__name__}: {error}") from error
