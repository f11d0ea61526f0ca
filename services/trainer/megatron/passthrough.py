"""Passes tables of the config to Megatron's dataclasses unchanged."""

import contextlib
import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from megatron.core.transformer.enums import AttnBackend

from services.common.errors import InvalidInput, Reason

Settings = TypeVar("Settings")

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


def make(cls: type[Settings], settings: Mapping[str, object], given: Mapping[str, Any], field: str) -> Settings:
    """Returns `cls(**settings)`, in which the user's `given` values override `settings`.

    Raises:
        InvalidInput: A given key is not a field of `cls`, or Megatron refuses the combination. The message has the key
            and `field`.
    """
    known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidInput(
                f"{field}.{key}: not a field of {cls.__module__}.{cls.__qualname__}{hint}",
                reason=Reason.INVALID_CONFIG,
                field=f"{field}.{key}",
            )
    with refusals(field):
        return cls(**{**settings, **{key: _typed(key, value, field) for key, value in given.items()}})


@contextlib.contextmanager
def refusals(field: str) -> Iterator[None]:
    """Converts the errors of Megatron's own checks to InvalidInput for the config `field`."""
    try:
        yield
    except (AssertionError, ValueError, TypeError) as error:
        raise InvalidInput(
            f"{field}: Megatron refuses the settings: {error}", reason=Reason.INVALID_CONFIG, field=field
        ) from error


def _typed(key: str, value: Any, field: str) -> Any:
    names: Mapping[str, object] = {}
    if key.endswith("_dtype") and key not in ("moe_router_dtype",):
        names = _DTYPES
    elif key == "attention_backend":
        names = AttnBackend.__members__
    if not names or not isinstance(value, str):
        return value
    if value.lower() not in names:
        raise InvalidInput(
            f"{field}.{key}: {value!r} is not one of {', '.join(names)}",
            reason=Reason.INVALID_CONFIG,
            field=f"{field}.{key}",
        )
    return names[value.lower()]
