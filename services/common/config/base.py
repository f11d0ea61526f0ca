"""Defines the base class of every config model."""

import ast
import functools
import inspect
import math
import os
import textwrap
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern that a name must match to be used for a file or directory."""

Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""A duration. The limit is 31 years: clocks and deadlines overflow with far longer ones."""

Compile = bool | Literal["auto"]
"""Whether to compile a model; auto depends on the run's steps."""

_COMPILED_STEPS = 50
"""Number of steps from which auto compiles. Of a step of 7.3 s with Qwen3-0.6B's shape on an
H100, torch.compile saves the trainer 1.3 s and the engine 0.5 s. It takes them 7 and 4 s, or the first time on a host
40 and 26 s, which smaller models make up for later."""


def _expanded(value: object) -> object:
    if isinstance(value, str | Path):
        return type(value)(os.path.expanduser(value))
    if isinstance(value, tuple):
        return tuple(map(_expanded, cast(tuple[object, ...], value)))
    if isinstance(value, dict):
        return {name: _expanded(one) for name, one in cast(dict[str, object], value).items()}
    return value


AT_HOME = AfterValidator(_expanded)
"""Marks a key whose paths may begin with ~, the user's home, which a shell leaves as it is in `key=~/a`."""

Table = dict[str, Any]
"""A table whose keys and values are not fixed, such as arguments for a function or a library."""


def compiles(setting: Compile, num_steps: int | None) -> bool:
    """Returns whether a run of `num_steps`, None if it counts epochs, compiles a model with this setting."""
    return (num_steps is None or num_steps >= _COMPILED_STEPS) if setting == "auto" else setting


class Strict(BaseModel):
    """The base of every config model: unknown keys, truth values as numbers and numbers that are not finite are
    refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_numbers(cls, values: object) -> object:
        """Refuses true and false for numbers, also in a list or table: pydantic would read them as 1 and 0.

        Refuses infinity and NaN wherever they are: pydantic allows them in values of any type, and JSON has neither.
        """
        if isinstance(values, dict):
            table = cast(dict[str, object], values)
            errors = [*_truth_values(cls, table), *_not_finite(table, ())]
            if errors:
                raise ValidationError.from_exception_data(cls.__name__, errors)
        return cast(object, values)

    @model_validator(mode="after")
    def _follows_its_rules(self) -> Self:
        self.check_rules()
        return self

    def check_rules(self) -> None:
        """Raises ValueError for the first rule between keys that is broken; a rule may assume all earlier ones."""


@functools.cache
def help_of(model: type[BaseModel]) -> Mapping[str, str]:
    """Returns the text below each key of `model` in its source: its help, from which docs/configuration.md is made.

    pydantic would read the source of every model whenever it is imported, which takes a quarter of a second.
    """
    kinds = (kind for kind in reversed(model.__mro__) if issubclass(kind, Strict))
    return {name: text for kind in kinds for name, text in _texts_below_keys(kind)}


def _texts_below_keys(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    (node,) = cast(list[ast.ClassDef], ast.parse(textwrap.dedent(inspect.getsource(model))).body)
    for key, text in pairwise(node.body):
        match key, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(help))):
                yield name, inspect.cleandoc(help)
            case _:
                pass


def _truth_values(model: type[BaseModel], values: Mapping[str, object]) -> Iterator[InitErrorDetails]:
    for name, field in model.model_fields.items():
        value, is_table = values.get(name), get_origin(field.annotation) is dict
        entries = list(cast(Table, value).values()) if is_table and isinstance(value, dict) else value
        is_list = isinstance(entries, list | tuple)
        types = _types(*get_args(field.annotation)) if is_list else _types(field.annotation)
        number = next((kind for kind in (float, int) if kind in types and bool not in types), None)
        for entry in cast(list[object], entries) if is_list else (entries,):
            if number and isinstance(entry, bool):
                yield InitErrorDetails(type=f"{number.__name__}_type", loc=(name,), input=entry)


def _not_finite(value: object, at: tuple[str | int, ...]) -> Iterator[InitErrorDetails]:
    """Yields an error for each infinity and NaN in the tables and lists of `value`, which is at `at`."""
    if isinstance(value, float) and not math.isfinite(value):
        yield InitErrorDetails(type="finite_number", loc=at, input=value)
    elif isinstance(value, dict):
        for name, one in cast(dict[str, object], value).items():
            yield from _not_finite(one, (*at, name))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(cast(list[object], value)):
            yield from _not_finite(one, (*at, index))


def _types(*annotations: object) -> set[object]:
    """Returns the types among `annotations`, with the members of unions and of the tuples in them."""
    types: set[object] = set()
    for one in annotations:
        # What follows the type in Annotated are limits, not types.
        parts = get_args(one)[:1] if get_origin(one) is Annotated else get_args(one)
        types |= _types(*parts) if get_origin(one) in (Union, UnionType, tuple, Annotated) else {one}
    return types


class AnyRun(Strict):
    """The keys that all kinds of runs have."""

    name: str = Field(default="run", pattern=NAME)
    """Name of the run, and of its directory in runs_dir."""
    runs_dir: Annotated[Path, AT_HOME] = Field(default=Path("runs"), validate_default=False)  # JSON has no Path
    """Directory that holds the directories of all runs."""
    model: Annotated[str, AT_HOME]
    """Path of the starting model on the trainer's host: a directory in Hugging Face format. If `lockstep` starts the
    trainer, it may also be a model on the Hugging Face Hub: OWNER/NAME or OWNER/NAME@REVISION."""
    resume: Annotated[str, AT_HOME] = "auto"
    """auto: resume from the newest verified checkpoint, or start fresh if there is none; must: fail if there is none;
    never: start fresh, and fail if the run's directory already holds a run; or the path of a checkpoint: the run goes
    back to it (or begins with it), and the same command resumes from the run's newest checkpoint since then. To go
    back to the same one again, resume with auto in between."""
    trace: bool = False
    """Write trace.json in the run's directory, for Perfetto: spans of the training loop and of every call to a service
    that this command started."""

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name


def is_set(section: Strict, key: str) -> bool:
    """Returns whether a key has another value than its default."""
    return getattr(section, key) != type(section).model_fields[key].get_default(call_default_factory=True)


def require_read(section: Strict, kind: str, kinds_of: Mapping[str, Collection[str]]) -> None:
    """Raises ValueError if a key is set that `kind` does not read; all kinds read the keys that are not listed."""
    for key, kinds in kinds_of.items():
        if kind not in kinds and is_set(section, key):
            raise ValueError(f"{key} is not read by kind {kind}, only by {', '.join(sorted(kinds))}: leave it out")


def require_switch(section: Strict, what: str) -> None:
    """Refuses keys of a section that nobody turned on. Who wrote `enabled: false` knows that it is off.

    Raises:
        ValueError: `enabled` was not given, and another key has a value that is not its default.
    """
    changed = section.model_dump(exclude_defaults=True)
    if "enabled" not in section.model_fields_set and changed:
        raise ValueError(
            f"{min(changed)} has no effect while {what} is off: set enabled: true (or false, to keep the key)"
        )
