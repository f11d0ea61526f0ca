"""Parses YAML with limits: a small text must not build a huge tree, and a key must not be set twice."""

from collections.abc import Iterable
from typing import Any, cast

import yaml

_MAX_VALUES = 100_000
_MAX_MERGED = 1_000
MAX_DEPTH = 100


class _Loader(yaml.SafeLoader):
    """Rejects what PyYAML accepts: a table that sets a key twice, and merges (`<<`) that multiply."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key.value} is set twice", problem_mark=node.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        num_own = len(node.value)
        super().flatten_mapping(node)  # calls itself for the tables that it merges
        if len(node.value) > num_own + _MAX_MERGED:
            raise yaml.constructor.ConstructorError(
                problem=f"its merges (<<) add more than {_MAX_MERGED} keys", problem_mark=node.start_mark
            )


def parse_yaml(text: str) -> Any:
    """Returns the value of a YAML text.

    Raises:
        yaml.YAMLError: The text is not YAML, sets a key twice, nests too deeply, or stands for too many values.
    """
    try:
        value = yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it nests too deeply") from error
    if _count(value, {}, 0) > _MAX_VALUES:
        raise yaml.YAMLError(f"it has more than {_MAX_VALUES} values once its aliases (*name) are written out")
    return value


def _count(value: object, counted: dict[int, int], depth: int) -> int:
    """Returns the number of values in `value`, an alias as often as it is used. `counted` has results by id.

    Raises:
        yaml.YAMLError: The nesting is too deep, or a value contains itself.
    """
    if not isinstance(value, dict | list):
        return 1
    if depth > MAX_DEPTH:
        raise yaml.YAMLError(f"it nests more than {MAX_DEPTH} levels deep, or an alias contains itself")
    key = id(cast(object, value))
    if key not in counted:
        children = cast(Iterable[object], value.values() if isinstance(value, dict) else value)
        counted[key] = 1 + sum(_count(child, counted, depth + 1) for child in children)
    return counted[key]
