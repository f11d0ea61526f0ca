"""Parses YAML, and describes wrong values.

A text is refused if it is small but stands for a huge tree (through aliases), or if a table sets a key twice.
"""

import functools
import re
from collections.abc import Hashable, Iterable
from datetime import date
from typing import Any, cast

import yaml
from pydantic_core import ErrorDetails

from services.common.import_path import IMPORT_PATH

# A config has hundreds of values; the aliases of a text of ten lines can stand for billions.
_MAX_VALUES = 100_000
_MAX_MERGED = 1_000
MAX_DEPTH = 100


class KeySetTwiceError(yaml.YAMLError):
    """A table sets a key twice. The message names the key and its lines."""


class _Loader(yaml.SafeLoader):
    """Refuses what PyYAML accepts: a table that sets a key twice, merges (`<<`) that multiply its keys, and half of a
    character. It joins the two halves in which JSON writes an emoji."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text = super().construct_scalar(node)
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError as error:
            problem = f"{text!a} has half of a character: write the character itself"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
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

# YAML 1.1 takes 010 for the octal number 8, and 1:30 for the sexagesimal 90, which nobody means. They stay text, which
# a key for a number reads as the decimal 10, or refuses.
_NO_NUMBER = re.compile(r"[-+]?0[0-9_]+|.*:.*")


def _number(construct: Any, loader: _Loader, node: yaml.ScalarNode) -> object:
    return node.value if _NO_NUMBER.fullmatch(node.value) else construct(loader, node)


_constructors = cast(Any, _Loader).yaml_constructors
for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    cast(Any, _Loader).add_constructor(_tag, functools.partial(_number, _constructors[_tag]))


def parse_yaml(text: str) -> object:
    """Returns the value of a YAML text.

    Raises:
        KeySetTwiceError: A table sets a key twice.
        yaml.YAMLError: The text is not YAML, nests too deeply, or stands for too many values.
    """
    try:
        value = yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it nests too deeply") from error
    except ValueError as error:  # of a date such as the 31st of February
        raise yaml.YAMLError(str(error)) from error
    if _count(value, {}, 0) > _MAX_VALUES:
        raise yaml.YAMLError(f"it has more than {_MAX_VALUES} values once its aliases (*name) are written out")
    return value


def parse_value(text: str) -> object:
    """Returns the value of an override.

    It is YAML if it begins like a table, a list or a quoted text. Otherwise it is a number, a truth value, a date or
    null if all of it is written like one, and else the text itself, of which YAML would end `a #b` before the `#`.

    Raises:
        yaml.YAMLError: What begins like a table, a list or a quoted text is none.
    """
    text = text.strip()
    if text.startswith(("{", "[", "'", '"')):
        return parse_yaml(text)
    loader: Any = _Loader("")
    try:
        return loader.construct_object(yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text))
    except (yaml.YAMLError, ValueError):  # of `<<`, and of Python for the 31st of February
        return text


def _count(value: object, sizes: dict[int, int], depth: int) -> int:
    """Returns the number of values in `value`, with an alias counted wherever it is used; `sizes` has results by id."""
    if not isinstance(value, dict | list):
        return 1
    if depth > MAX_DEPTH:
        raise yaml.YAMLError(f"it nests more than {MAX_DEPTH} levels deep, or an alias contains itself")
    key = id(cast(object, value))
    if key not in sizes:
        children = cast(Iterable[object], value.values() if isinstance(value, dict) else value)
        sizes[key] = 1 + sum(_count(child, sizes, depth + 1) for child in children)
    return sizes[key]


_TYPES = {
    "model_type": "a table of keys",
    "model_attributes_type": "a table of keys",
    "dict_type": "a table of keys",
    "tuple_type": "a list",
    "list_type": "a list",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}

# Values of verl and SkyRL, and what they are called here.
_OTHER_VALUES = {
    "kl": "k1",
    "mse": "k2",
    "low_var_kl": "k3",
    "vanilla": "grpo",
    "regular": "grpo",
    "geo_mean": "gmpo",
    "reinforce++": "reinforce_plus_plus",
    "sequence_mean": "seq_mean_token_mean",
    "fsdp2": "fsdp",
    "constant_with_warmup": "constant",
}


def in_words(detail: ErrorDetails) -> str:
    """Returns what the value must be, and what it is."""
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "string_type" and isinstance(value, int | float | date):  # a truth value is an int
        of_bool = f"a truth value, as YAML reads {'yes, on' if value else 'no, off'} and {str(value).lower()}"
        what = of_bool if isinstance(value, bool) else "a date" if isinstance(value, date) else "a number"
        return f"must be text, and {value} is {what}: put it into quotes, on the command line as '\"...\"'"
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, not {'null' if value is None else repr(value)}"
    if kind in _BOUNDS:
        word, limit = _BOUNDS[kind]
        return f"must be {word} {context[limit]}, not {value!r}"
    if kind == "literal_error":
        meant = _OTHER_VALUES.get(value, value.replace("-", "_")) if isinstance(value, str) else value
        hint = f"; did you mean {meant}?" if f"'{meant}'" in context["expected"] else ""
        return f"must be {context['expected']}, not {value!r}{hint}"
    if kind == "union_tag_invalid":
        return (
            f"{_unquoted(context['discriminator'])} {context['tag']!r} is none of {_unquoted(context['expected_tags'])}"
        )
    if kind == "union_tag_not_found":
        return f"{_unquoted(context['discriminator'])} is required and not set"
    if kind in ("too_short", "too_long"):
        bound, limit = ("at least", "min_length") if kind == "too_short" else ("at most", "max_length")
        return f"must have {bound} {context[limit]} entries, not {context['actual_length']}"
    if kind == "string_pattern_mismatch" and IMPORT_PATH in context["pattern"]:
        return f"must be package.module:name, such as my_rewards:score, not {value!r}"
    return f"{re.sub('^(Input|String|Value) should ', 'must ', detail['msg'])}, not {value!r}"


def _unquoted(quoted: str) -> str:
    return quoted.replace("'", "")
