"""Says in plain words what pydantic found wrong with a value."""

import re

from pydantic_core import ErrorDetails

from services.common.import_path import IMPORT_PATH

_WANTED = {
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


def in_words(detail: ErrorDetails) -> str:
    """Returns what the value must be, and what it is."""
    kind, context, given = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}, not {given!r}"
    if kind in _BOUNDS:
        word, limit = _BOUNDS[kind]
        return f"must be {word} {context[limit]}, not {given!r}"
    if kind == "literal_error":
        return f"must be {context['expected']}, not {given!r}"
    if kind == "union_tag_invalid":
        return f"{_bare(context['discriminator'])} {context['tag']!r} is none of {_bare(context['expected_tags'])}"
    if kind == "union_tag_not_found":
        return f"{_bare(context['discriminator'])} is required and not set"
    if kind in ("too_short", "too_long"):
        bound, limit = ("at least", "min_length") if kind == "too_short" else ("at most", "max_length")
        return f"must have {bound} {context[limit]} entries, not {context['actual_length']}"
    if kind == "string_pattern_mismatch" and IMPORT_PATH in context["pattern"]:
        return f"must be package.module:name, such as my_rewards:score, not {given!r}"
    return f"{re.sub('^(Input|String|Value) should ', 'must ', detail['msg'])}, not {given!r}"


def _bare(quoted: str) -> str:
    return quoted.replace("'", "")
