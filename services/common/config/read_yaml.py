"""Parses YAML, suggests known keys for unknown ones, and describes wrong values.

A text is refused if it is small but stands for a huge tree (through aliases), or if a table sets a key twice.
"""

import difflib
import functools
import re
from collections.abc import Hashable, Iterable, Sequence
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


# Names that other trainers (TRL, verl, OpenRLHF) use, in any table or in one, and the last part of Lockstep's name, or
# all of it where the last part alone is nearer to another key.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "batch_size": "prompts_per_step",
    "train_batch_size": "prompts_per_step",
    "num_generations": "completions_per_prompt",
    "group_size": "completions_per_prompt",
    "n": "completions_per_prompt",
    "max_steps": "num_steps",
    "total_steps": "num_steps",
    "total_training_steps": "num_steps",
    "epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "trainer.num_train_epochs": "num_steps",  # passes over the data, unlike trainer.num_epochs
    "trainer.total_epochs": "num_steps",
    "max_new_tokens": "max_tokens",
    "max_completion_length": "rollout.sampling.max_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "max_response_length": "rollout.sampling.max_tokens",
    "train_files": "data.train",
    "val_files": "data.eval",
    "save_steps": "save_freq",
    "eval_steps": "eval_freq",
    "test_freq": "eval_freq",
    "save_total_limit": "max_ckpts_to_keep",
    "per_device_train_batch_size": "prompts_per_step",
    "gradient_accumulation_steps": "max_tokens_per_microbatch",
    "num_iterations": "trainer.num_epochs",
    "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup_steps",
    "bf16": "compute_dtype",
    "beta": "kl_coef",
    "optim.beta": "betas",
    "epsilon": "clip_low",
    "optim.epsilon": "eps",
    "epsilon_high": "clip_high",
    "loss_type": "aggregation",
    "reward_funcs": "scorers",
    "resume_from_checkpoint": "resume",
    "output_dir": "runs_dir",
    "run_name": "name",
}


def suggest(known: Sequence[str], path: str, value: object) -> str:
    """Returns the dotted key of `known` that is nearest to the unknown key `path`, or "" if none is near.

    A key outside of sections that is called like it comes first. If `path` begins with a section that exists, only the
    keys of that section are searched, and then one elsewhere if no other key is called like it. Of equally near keys,
    the first is returned. If `value`, the value of the unknown key, is a table with a single key, that key is added to
    the path, because only its last part may be misspelled.
    """
    while isinstance(value, dict) and len(table := cast(dict[str, object], value)) == 1:
        ((name, value),) = table.items()
        path = f"{path}.{name}"
    section, (parent, leaf) = path.partition(".")[0], _split(path)
    prefix = f"{section}." if any(key.startswith(f"{section}.") for key in known) else ""
    in_section = [key for key in known if key.startswith(prefix)]
    siblings = [key for key in known if _split(key)[0] == parent]
    leaf = _OTHER_NAMES.get(".".join(path.split(".")[-2:])) or _OTHER_NAMES.get(leaf, leaf)
    written = f"{parent}.{leaf}" if parent else leaf
    everywhere = [key for key in known if _split(key)[1] == leaf]
    # Without the section, because what all keys have in common makes none of them near.
    by_rest = {key.removeprefix(prefix): key for key in in_section}
    close = difflib.get_close_matches(written.removeprefix(prefix), by_rest, n=1, cutoff=0.8)
    near = by_rest[close[0]] if close else ""
    return (
        (leaf if leaf in known else "")
        or (near if prefix else "")
        or (everywhere[0] if len(everywhere) == 1 else "")
        or _by_leaf(siblings, leaf)
        or _best([key for key in in_section if _split(key)[1] == leaf], parent)
        or near
        or _by_leaf([key for key in in_section if "[" not in key and "<" not in key], leaf)
    )


def _split(path: str) -> tuple[str, str]:
    parent, _, leaf = path.rpartition(".")
    return parent, leaf


def _by_leaf(among: Sequence[str], leaf: str) -> str:
    """Returns the first key whose last part is nearest to `leaf`."""
    by_leaf = {_split(key)[1]: key for key in reversed(among)}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    return by_leaf[close[0]] if close else ""


def _best(among: Sequence[str], parent: str) -> str:
    """Returns the first key whose table is named like `parent`, else the first key. Keys in lists are left out."""
    plain = [key for key in among if "[" not in key and "<" not in key]
    written = parent.rpartition(".")[2]
    return next((key for key in plain if _split(key)[0].endswith(written)), plain[0] if plain else "")


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
        return f"must be {context['expected']}, not {value!r}"
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
