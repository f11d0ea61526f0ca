"""Suggests an existing key in place of an unknown one."""

import difflib
from collections.abc import Collection, Sequence
from typing import cast

# Names that other trainers (TRL, verl, OpenRLHF) use, and the last part of Lockstep's name.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "batch_size": "prompts_per_step",
    "train_batch_size": "prompts_per_step",
    "num_generations": "completions_per_prompt",
    "group_size": "completions_per_prompt",
    "n": "completions_per_prompt",
    "max_steps": "num_steps",
    "total_steps": "num_steps",
    "epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "max_new_tokens": "max_tokens",
    "max_completion_length": "max_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "save_steps": "save_freq",
    "eval_steps": "eval_freq",
}


def suggest(known: Sequence[str], path: str, value: object) -> str:
    """Returns the known key nearest to the unknown key `path`, or an empty string if none is near.

    Only keys of the same section are suggested if `path` begins with a section that exists.

    Args:
        known: All dotted keys, the more usual before the less usual.
        path: The dotted key as it was written, up to its first unknown part.
        value: Its value. If it is a table with only one key, that key is taken as part of the path.
    """
    while isinstance(value, dict) and len(table := cast(dict[str, object], value)) == 1:
        ((name, value),) = table.items()
        path = f"{path}.{name}"
    section, parent, leaf = path.partition(".")[0], *_split(path)
    in_section = [key for key in known if key.startswith(f"{section}.")] or known
    siblings = [key for key in known if _split(key)[0] == parent]
    leaf = _OTHER_NAMES.get(leaf, leaf)
    near_path = difflib.get_close_matches(f"{parent}.{leaf}" if parent else leaf, in_section, n=1, cutoff=0.8)
    return (
        _by_leaf(siblings, leaf)
        or _best([key for key in in_section if _split(key)[1] == leaf], parent)
        or next(iter(near_path), "")
        or _by_leaf([key for key in in_section if "[" not in key and "<" not in key], leaf)
    )


def _split(path: str) -> tuple[str, str]:
    parent, _, leaf = path.rpartition(".")
    return parent, leaf


def _by_leaf(among: Collection[str], leaf: str) -> str:
    """Returns the first key whose last part is nearest to `leaf`."""
    by_leaf: dict[str, str] = {}
    for key in among:
        by_leaf.setdefault(_split(key)[1], key)
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    return by_leaf[close[0]] if close else ""


def _best(among: Sequence[str], parent: str) -> str:
    """Returns the first key whose table is named like `parent`, else the first key. Keys in lists are left out."""
    plain = [key for key in among if "[" not in key and "<" not in key]
    written = parent.rpartition(".")[2]
    return next((key for key in plain if _split(key)[0].endswith(written)), plain[0] if plain else "")
