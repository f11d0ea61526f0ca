"""Builds a validated config from YAML files and dotted overrides, with errors that a person can act on."""

import functools
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from services.common.config.base import Table, help_of
from services.common.config.read_yaml import MAX_DEPTH, KeySetTwiceError, in_words, parse_value, parse_yaml
from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.common.config.trainer import RoleConfig, TrainerConfig
from services.common.config.unknown_keys import explain_unknown
from services.common.errors import InvalidInput, Reason


def models_of(annotation: object) -> list[type[BaseModel]]:
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


@functools.cache  # or it would take a quarter of the time of each load
def _open_paths(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(open_tables(model))


def is_replaced(path: str, before: Mapping[str, object], value: object, open_paths: Collection[str]) -> bool:
    """Returns whether `value` replaces the table `before` at `path`: it is no table, or an empty one or one of another
    kind among `open_paths`.
    """
    if not isinstance(value, dict):
        return True
    if path not in open_paths:
        return False
    table = cast(dict[str, object], value)
    return not table or ("kind" in before and table.get("kind", before["kind"]) != before["kind"])


Model = TypeVar("Model", bound=BaseModel)

_MAX_SHOWN = 200  # characters of a wrong value in an error
_NAME_OF_ENTRY = "[key]"  # pydantic's last part of a place, if the key before it is wrong and not its value


@dataclass(frozen=True)
class Key:
    """One config key: its dotted path such as `trainer.optim.lr`, type, default and help."""

    path: str
    type: str
    default: str
    help: str


def load(model: type[Model], args: Sequence[str]) -> Model:
    """Builds `model` from `args`, which are paths of YAML files and `a.b.c=value` overrides; later ones win.

    Raises:
        InvalidInput: A file is missing or not YAML, a key is unknown, or a value is invalid. The message names the key
            and where it was set.
    """
    tree, origin = read(model, args)
    _require_kind(model, tree)
    return validate(model, tree, origin)


def read(model: type[BaseModel], args: Sequence[str]) -> tuple[Table, dict[str, str]]:
    """Merges `args` as `load` does, without validation. Returns the tree of values and the source of each.

    Tables are merged key by key. One of several kinds is replaced by one of another kind, and a table of entries with
    free names by an empty one.
    """
    merged = _Merged(_open_paths(model), {}, {})
    for arg in args:
        if is_override(arg):
            merged.add(merged.tree, _parse_override(arg), source="command line")
            continue
        # What begins like a key is probably an override without its value.
        if arg.partition(".")[0] in model.model_fields and not os.path.exists(arg):
            raise InvalidInput(f"{arg} is no file; to set this key, write {arg}=VALUE", reason=Reason.INVALID_CONFIG)
        merged.add(merged.tree, _read_yaml(Path(arg)), source=arg)
    return merged.tree, merged.origin


def is_override(arg: str) -> bool:
    """Returns whether an argument is `key=value`, and not the path of a file."""
    return "=" in arg and not os.path.exists(arg)  # Path.exists raises if arg is too long for a path


def parse_json(model: type[Model], text: str, *, field: str = "config_json") -> Model:
    """Builds `model` from a config section that was received as JSON. `field` names the section in errors."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"] and first["type"] != "value_error":  # about the section as a whole
            empty = "is empty; send the section as JSON, {} if it has only defaults"
            message = f"{field}: {in_words(first) if text.strip() else empty}"
            raise InvalidInput(message, reason=Reason.INVALID_CONFIG, field=field) from error
        raise _explain(model, error, json.loads(text), {}) from error


def keys(model: type[BaseModel], prefix: str = "", listed: dict[type[BaseModel], str] | None = None) -> Iterator[Key]:
    """Yields all keys of `model`, depth first and in field order. An optional table is expanded only the first time.

    For a table that is one of several kinds, the keys that all kinds have come first: `a.b`, and then `a[kind].c` of
    each.
    """
    listed = {} if listed is None else listed
    for name, field in model.model_fields.items():
        nested = models_of(field.annotation)
        if len(nested) == 1 and isinstance(field.annotation, type):
            listed[nested[0]] = prefix + name
            yield from keys(nested[0], f"{prefix}{name}.", listed)
            continue
        default = field.get_default(call_default_factory=True)
        default = str(default) if isinstance(default, Path) else default
        again = f" as {listed[nested[0]]}" if nested and nested[0] in listed else ""
        yield Key(
            path=prefix + name,
            type=_type_name(field.annotation) + again,
            default="required" if default is PydanticUndefined else repr(default),
            help=" ".join(help_of(model).get(name, "").split()),
        )
        shared = _shared(nested) if get_origin(field.annotation) not in (tuple, dict) else frozenset[str]()
        common = [(nested[0], True)] if shared else []
        for option, is_shared in [*common, *((option, False) for option in nested)]:
            if option not in listed:
                into = f"{prefix}{name}." if is_shared else prefix + _path_into(name, field.annotation, option)
                options_keys = keys(option, into, {**listed} if is_shared else listed)
                first_names = ((key, re.split(r"[.[]", key.path.removeprefix(into))[0]) for key in options_keys)
                yield from (key for key, name in first_names if (name in shared) is is_shared)


def _shared(options: Sequence[type[BaseModel]]) -> frozenset[str]:
    """Returns the names of the fields that are the same in all of several models; none if there is only one."""
    if len(options) < 2:
        return frozenset()
    described = [
        {
            name: (field.annotation, str(field.default), help_of(option).get(name))
            for name, field in option.model_fields.items()
        }
        for option in options
    ]
    return frozenset(name for name, one in described[0].items() if all(other.get(name) == one for other in described))


def _path_into(name: str, annotation: object, option: type[BaseModel]) -> str:
    origin = get_origin(annotation)
    if origin is dict:
        return f"{name}.<name>."
    if origin is not tuple and len(models_of(annotation)) == 1:
        return f"{name}."
    kind = option.model_fields.get("kind")
    return f"{name}[{get_args(kind.annotation)[0] if kind else option.__name__}]."


def _read_yaml(path: Path) -> Table:
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidInput(f"config file {path} does not exist", reason=Reason.INVALID_CONFIG) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"config file {path} cannot be read: {error}", reason=Reason.INVALID_CONFIG) from error
    except KeySetTwiceError as error:
        raise InvalidInput(f"{path}: {error}", reason=Reason.INVALID_CONFIG) from error
    except yaml.YAMLError as error:
        raise InvalidInput(
            f"{path} is not YAML: {' '.join(str(error).split())}", reason=Reason.INVALID_CONFIG
        ) from error
    if content is not None and not isinstance(content, dict):
        raise InvalidInput(f"{path} must contain a table of keys, not a {type(content).__name__}")
    return cast(Table, content or {})


def _parse_override(arg: str) -> Table:
    path, _, text = arg.partition("=")
    try:
        value = parse_value(text)
    except yaml.YAMLError as error:
        shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
        raise InvalidInput(f"{path}: {shown!r} is not a YAML value: {' '.join(str(error).split())}") from error
    names = path.split(".")
    if len(names) > MAX_DEPTH:
        raise InvalidInput(f"{path[:_MAX_SHOWN]}...: no key has {len(names)} parts")
    for name in reversed(names):
        value = {name: value}
    return cast(Table, value)


@dataclass(frozen=True)
class _Merged:
    """Values being merged; `origin` has the source of each that is not a table. See `open_tables` for `open_paths`."""

    open_paths: frozenset[str]
    tree: Table
    origin: dict[str, str]

    def add(self, tree: Table, part: Table, *, source: str, at: str = "") -> None:
        """Merges `part` into `tree`, the table at `at`."""
        for name, value in part.items():
            path, before = f"{at}{name}", tree.get(name)
            is_kept = isinstance(before, dict) and not is_replaced(path, cast(Table, before), value, self.open_paths)
            if isinstance(value, dict) and isinstance(before, list):
                raise InvalidInput(f"{path} is a list, which can only be set as a whole: {path}=[...]", field=path)
            if not is_kept:
                # What was set there before is gone, and an error must not name where it came from.
                for replaced in [key for key in self.origin if key == path or key.startswith(f"{path}.")]:
                    del self.origin[replaced]
                tree[name] = {} if isinstance(value, dict) else value
            if isinstance(value, dict) and value:
                self.add(tree[name], cast(Table, value), source=source, at=path + ".")
            else:
                self.origin[path] = source


def validate(model: type[Model], tree: Table, origin: Mapping[str, str]) -> Model:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise _explain(model, error, tree, origin) from error


def _explain(model: type[BaseModel], error: ValidationError, tree: object, origin: Mapping[str, str]) -> InvalidInput:
    problems = error.errors(include_url=False)
    # Pydantic also reports a list whose elements are invalid as too short; keep the errors of the elements only.
    elements = {problem["loc"][:end] for problem in problems for end in range(len(problem["loc"]))}
    details = [problem for problem in problems if problem["loc"] not in elements]
    paths = [_path(detail["loc"], tree) for detail in details]
    lines = [line for path, detail in zip(paths, details, strict=True) for line in _lines(model, path, detail, origin)]
    text = lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems:", *lines])
    return InvalidInput(text, reason=Reason.INVALID_CONFIG, field=paths[0])


def _path(loc: Sequence[int | str], tree: object) -> str:
    """Returns a place in the tree as the user writes it: without the kinds, by which pydantic names parts of unions."""
    loc = loc[:-2] if loc[-1:] == (_NAME_OF_ENTRY,) else loc
    parts, here, is_known = list[str](), tree, False
    for part, following in zip(loc, (*loc[1:], None), strict=False):
        value = _part(here, part)
        # The kind `tools` also has a key of that name, which may be missing, or whose value is a list.
        is_list = _part(value, 0) is not None
        if part == _part(here, "kind") and not is_known and (value is None or (is_list and isinstance(following, str))):
            is_known = True
            continue
        parts.append(str(part))
        here, is_known = value, False
    return ".".join(parts)


def _part(value: object, key: int | str) -> object:
    """Returns the value of a key of a table, or an element of a list; None if there is none."""
    if isinstance(value, dict):
        return cast(Table, value).get(str(key))
    elements = cast(list[object], value) if isinstance(value, list) else []
    return elements[key] if isinstance(key, int) and key < len(elements) else None


def _lines(model: type[BaseModel], path: str, detail: ErrorDetails, origin: Mapping[str, str]) -> Iterator[str]:
    """Yields an error's line; several for a table of which several keys are unknown."""
    if detail["type"] != "extra_forbidden":
        yield _explain_one(path, detail, origin)
        return
    # A section that was received has been checked by its sender, which then knows other keys.
    other = "" if origin else "; if you did not set it, another version of Lockstep wrote it"
    with_kinds = ".".join(map(str, detail["loc"]))
    if "[" in with_kinds:
        yield f"{path}: unknown key{_where(path, '', origin)}{_without_kinds(with_kinds)}{other}"
        return
    for key, hint in explain_unknown([key.path for key in keys(model)], with_kinds, detail["input"]):
        written = path + key.removeprefix(with_kinds)
        yield f"{written}: unknown key{_where(written, '', origin)}; {hint}{other}"


def _where(path: str, message: str, origin: Mapping[str, str]) -> str:
    sources = _sources(path, message, origin)
    return f" (from {' and '.join(sources)})" if sources else ""


def _explain_one(path: str, detail: ErrorDetails, origin: Mapping[str, str]) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    where = _where(path, message, origin)
    if detail["type"] == "missing":
        return f"{path}: required and not set"
    if detail["type"] == "value_error":
        return f"{path}: {message}{where}" if path else f"{message}{where}"
    what = "a name " if detail["loc"][-1:] == (_NAME_OF_ENTRY,) else ""
    return f"{path}: {what}{in_words(detail)}{where}"


def _sources(path: str, message: str, origin: Mapping[str, str]) -> list[str]:
    """Returns where the value at `path` was set. For a table: where the keys that `message` names were, else all."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):  # a table or list may have been set as a whole
        if (parent := ".".join(parts[:end])) in origin:
            return [origin[parent]]
    prefix = f"{path}." if path else ""
    below = {key.removeprefix(prefix): source for key, source in origin.items() if key.startswith(prefix)}
    named = [source for key, source in below.items() if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", message)]
    return list(dict.fromkeys(named or (below.values() if path else ())))


def _without_kinds(path: str) -> str:
    """Returns the end of the error for `path`, which names kinds as the reference of keys does: `a[kind].b`."""
    head, bare = path.partition("[")[0], re.sub(r"\[[^\]]*\]", "", path)
    is_list = re.search(r"\[\d+\]", path) or head == "reward.scorers" or head.endswith("tools")
    return f": {head} is a list, which can only be set as a whole" if is_list else f"; did you mean {bare}?"


def _type_name(annotation: object) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    if models_of(annotation):
        return "list" if get_origin(annotation) is tuple else "table"
    # Leaves out the limits that `Annotated` holds, at any depth.
    bare = get_type_hints(SimpleNamespace(__annotations__={"key": annotation}))["key"]
    return str(bare).replace("typing.", "").replace("pathlib.", "")


AnyConfig = Config | SftConfig


def role_section(config: AnyConfig, name: str) -> RoleConfig | None:
    """Returns the section of another model; None for `trainer`, and where there is no such model."""
    return config.role_sections.get(name) if isinstance(config, Config) else None


def role_models(config: AnyConfig) -> Iterator[tuple[str, TrainerConfig, Path]]:
    """Yields each model's section, the settings of its ranks, and its directory, by default the policy's."""
    for name, settings in config.models.items():
        section = role_section(config, name)
        yield name, settings, Path((section and section.model) or config.model)


def load_any(args: Sequence[str]) -> AnyConfig:
    """Loads the config of either kind. A supervised run's has data.samples_per_step and no section `reward`."""
    # Tables that both kinds of runs have are of the same classes.
    tree, origin = read(Config, args)
    is_supervised = "reward" not in tree and "samples_per_step" in _data(tree)
    return validate(SftConfig if is_supervised else Config, tree, origin)


# The command of each kind of run, and the required key in `data` that no other kind has.
_KINDS: dict[type[BaseModel], tuple[str, str]] = {
    Config: ("run", "prompts_per_step"),
    SftConfig: ("sft", "samples_per_step"),
}


def _data(tree: Table) -> Table:
    return cast(Table, data) if isinstance(data := tree.get("data"), dict) else {}


def _require_kind(model: type[BaseModel], tree: Table) -> None:
    """Raises InvalidInput if `tree` is the config of another kind of run: most of its keys would be unknown."""
    command, own = _KINDS.get(model, ("", ""))
    for other, key in _KINDS.values():
        is_other = key in _data(tree) and own not in _data(tree) and not (command == "run" and "reward" in tree)
        if command and is_other:
            message = f"this is a config of `lockstep {other}`, not of `lockstep {command}`: it has data.{key}"
            raise InvalidInput(message, reason=Reason.INVALID_CONFIG, field=f"data.{key}")
