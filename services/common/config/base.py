"""Defines the base class of every config model."""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern that a name must match to be used for a file or directory."""


class Strict(BaseModel):
    """Rejects unknown keys and truth values as numbers, is immutable, and validates defaults like any other value."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_value_is_a_number(cls, values: object) -> object:
        """Refuses true and false for numbers, also as entries of a list: pydantic would read them as 1 and 0."""
        if isinstance(values, dict):
            errors = list(_truth_values(cls, cast(dict[str, Any], values)))
            if errors:
                raise ValidationError.from_exception_data(cls.__name__, errors)
        return cast(object, values)


def _truth_values(model: type[BaseModel], values: Mapping[str, Any]) -> Iterator[InitErrorDetails]:
    for name, field in model.model_fields.items():
        given, annotation = values.get(name), field.annotation
        is_list = isinstance(given, list | tuple)
        types = _types(*get_args(annotation)) if is_list else _types(annotation)
        wanted = next((kind for kind in (float, int) if kind in types and bool not in types), None)
        for one in cast(list[object], given) if is_list else (given,):
            if wanted and isinstance(one, bool):
                yield InitErrorDetails(type=f"{wanted.__name__}_type", loc=(name,), input=one)


def _types(*annotations: Any) -> set[Any]:
    """Returns the types among `annotations`, with the members of unions and of the tuples in them."""
    found: set[Any] = set()
    for one in annotations:
        found |= _types(*get_args(one)) if get_origin(one) in (Union, UnionType, tuple) else {one}
    return found
