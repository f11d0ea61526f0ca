"""Calls a reward function with the arguments for which it was written: Lockstep's, TRL's or verl's.

The parameters decide: `completions` and `completion_ids` are TRL's (GRPOTrainer._calculate_rewards), `solution_str` is
verl's (compute_score). What TRL passes and Lockstep does not have is refused by name, and is never None. Only its
functions that record, which change no reward, are replaced by one that does nothing.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from services.common.import_path import ITEM_FIELDS, require_takes
from services.common.json_values import JsonMapping, JsonObject
from services.reward.errors import FailureReason, ScoringError

_MARKS = {"completions": "TRL", "completion_ids": "TRL", "solution_str": "verl"}
_ONLY_TRL = ("trainer_state", "environments")
_RECORD = ("log_extra", "log_metric")
_NO_COLUMNS = ("prompt", "completion", "completion_ids")  # of the rows; TRL leaves them out too
_OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


class Convention:
    """How a function is called, and how its results are read."""

    def __init__(self, function: Callable[..., object], path: str, arguments: Sequence[str]):
        """`arguments` are the names of those that Lockstep's own functions get, with the scorer's kwargs.

        Raises:
            TypeError: The function does not take its arguments, or takes one that Lockstep does not have.
        """
        self._path = path
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # a function in C may have none
            parameters = ()
        named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self._names = {one.name for one in named}
        self._required = [one.name for one in named if one.default is one.empty]
        self._takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        # Without a value for them, none of these functions could be called with Lockstep's arguments.
        marks = [_MARKS[name] for name in self._required if name in _MARKS and name not in arguments]
        self.name = marks[0] if marks else "Lockstep"
        self.reads_tokens = self.name == "TRL" and "completion_ids" in self._names.difference(arguments)
        if self.name == "Lockstep":
            require_takes(function, path, (), dict.fromkeys(arguments))
        elif self.name == "TRL":
            self._refuse(self._names.intersection(_ONLY_TRL).difference(arguments))
        else:
            self._refuse(set(self._required).difference(_OF_VERL, arguments))

    def arguments(self, fields: JsonMapping) -> JsonMapping:
        """Returns the keyword arguments of a call: for TRL's functions of the lists of a group, else of a sample.

        Raises:
            ScoringError: The rows do not have a column that the function takes.
        """
        if self.name == "Lockstep":
            return fields
        kwargs = {name: value for name, value in fields.items() if name not in ITEM_FIELDS}
        passed = {**(_of_trl(fields) if self.name == "TRL" else _of_verl(fields)), **kwargs}
        if missing := [name for name in self._required if name not in passed]:
            row = fields["extra"] if self.name == "verl" else fields["extra"][0]
            has = f"the rows have {', '.join(row) or 'no further columns'}"
            fix = f"list it in data.extra_columns, or set kwargs; {has}"
            detail = f"no column {missing[0]!r}, which {self._path} takes: {fix}"
            raise ScoringError(FailureReason.INVALID_ANSWER, detail)
        if not self._takes_any:
            return {name: value for name, value in passed.items() if name in self._names}
        absent = ("completion_ids", *_ONLY_TRL) if self.name == "TRL" else ()
        return {**{name: _NotPassed(name) for name in absent}, **passed}

    def score(self, result: object) -> object:
        """Returns the score in one sample's result: TRL adds nothing for None, and verl reads `score` of a dict."""
        if self.name == "TRL" and result is None:
            return 0.0
        return result["score"] if self.name == "verl" and isinstance(result, Mapping) else result

    def _refuse(self, names: set[str]) -> None:
        if names:
            raise TypeError(_not_passed(f"{self._path} takes {min(names)}, which", self.name))


def _of_trl(fields: JsonMapping) -> dict[str, object]:
    prompts, completions = fields["prompt"], fields["completion"]
    if not isinstance(prompts[0], str):
        *_, last = prompts[0]
        is_continued = last["role"] == "assistant"
        begun = last["content"] if is_continued else ""
        completions = [[{"role": "assistant", "content": begun + text}] for text in completions]
        prompts = [messages[: len(messages) - is_continued] for messages in prompts]
    rows = fields["extra"]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _NO_COLUMNS}
    recording = dict.fromkeys(_RECORD, _do_nothing)
    return {"answer": fields["answer"], **columns, **recording, "prompts": prompts, "completions": completions}


def _do_nothing(*_: object, **__: object) -> None:
    """Stands for TRL's log_extra(column, values) and log_metric(name, value)."""


def _of_verl(fields: JsonMapping) -> JsonObject:
    row = fields["extra"]
    model = row.get("reward_model")
    has_truth = isinstance(model, Mapping) and "ground_truth" in model
    columns = {name: row[name] for name in ("data_source", "extra_info") if name in row}
    truth = model["ground_truth"] if has_truth else fields["answer"]  # as in the row, where answers are text
    return {**columns, "solution_str": fields["completion"], "ground_truth": truth}


def _not_passed(what: str, library: str) -> str:
    fix = "set it in the scorer's kwargs, or write the function for Lockstep's arguments"
    return f"{what} Lockstep does not pass to a function of {library}: {fix}"


class _NotPassed:
    """Stands for an argument that TRL passes and Lockstep does not: whatever a function does with it raises."""

    def __init__(self, name: str):
        self._name = name

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        message = _not_passed(f"it uses {self._name}, which", "TRL")
        if self._name == "completion_ids":  # tokens are sent only to functions that are known to read them
            message = f"{message.partition(':')[0]} without that parameter: add completion_ids to its parameters"
        raise TypeError(message)

    __getattr__ = __call__ = __iter__ = __len__ = __bool__ = __getitem__ = _refuse
