"""Says which tables a later file or override replaces; all others are merged key by key."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """Returns the config classes that a type names, in their order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in models_of(arg)]


def open_tables(model: type[BaseModel], at: str = "") -> Iterator[str]:
    """Yields the dotted paths of tables whose keys are not fixed: entries with free names, or one of several kinds."""
    for name, field in model.model_fields.items():
        path, origin, nested = at + name, get_origin(field.annotation), models_of(field.annotation)
        if origin is dict or len(nested) > 1:
            yield path
        if origin not in (dict, tuple):
            for option in nested:
                yield from open_tables(option, f"{path}.")


def is_replaced(path: str, before: Mapping[Any, Any], value: object, open_paths: Collection[str]) -> bool:
    """Returns whether `value` replaces the table `before` at `path`: it is no table, or an empty one or one of another
    kind among `open_paths`.
    """
    if not isinstance(value, dict):
        return True
    if path not in open_paths:
        return False
    table = cast(dict[str, Any], value)
    return not table or ("kind" in before and table.get("kind", before["kind"]) != before["kind"])
