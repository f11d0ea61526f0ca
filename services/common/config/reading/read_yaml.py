"""Parses YAML with limits: a small text must not build a huge tree, and a key must not be set twice."""

import re
from collections.abc import Iterable
from typing import Any, cast

import yaml

_MAX_VALUES = 100_000
_MAX_MERGED = 1_000
MAX_DEPTH = 100


class KeySetTwiceError(yaml.YAMLError):
    """A table sets a key twice. The message names the key and its lines."""


class _Loader(yaml.SafeLoader):
    """Rejects what PyYAML accepts: a table that sets a key twice, and merges (`<<`) that multiply."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if before := lines.get(key.value):
                    where = f"in line {line}" if before == line else f"in lines {before} and {line}"
                    raise KeySetTwiceError(f"{key.value} is set twice, {where}: remove one")
                lines[key.value] = line
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        num_own = len(node.value)
        super().flatten_mapping(node)  # calls itself for the tables that it merges
        if len(node.value) > num_own + _MAX_MERGED:
            raise yaml.constructor.ConstructorError(
                problem=f"its merges (<<) add more than {_MAX_MERGED} keys", problem_mark=node.start_mark
            )


# YAML 1.2 takes 1e3 and 1.5e-6 for numbers, but PyYAML only 1.0e+3.
cast(Any, _Loader).add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}$"), [*"+-.0123456789"]
)


def parse_yaml(text: str) -> Any:
    """Returns the value of a YAML text.

    Raises:
        KeySetTwiceError: A table sets a key twice.
        yaml.YAMLError: The text is not YAML, nests too deeply, or stands for too many values.
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
