"""Loads the prompts of a run, and orders those that a step tries.

Both are pure functions of (dataset, seed, step) and of recorded success rates, so no loader state is saved.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from lockstep.types.v1.types_pb2 import ModelCard

from services.common.config.advantage import CurriculumConfig
from services.common.config.data import DataConfig
from services.common.config.environment import AgentEnvironmentConfig
from services.common.config.load import AnyConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.common.model_card import read_model_card, write_model_card
from services.coordinator.data.order import EpochOrder, shuffled
from services.coordinator.data.reading.rows import AnswerlessFile, PromptFile, PromptRow, RowPrompt
from services.coordinator.text.chat_template import Message
from services.coordinator.text.tokenizer import Tokenizer

MODEL_CARD = "model_card"
"""Name of the directory in a run's with the card that the trainer sent, if only the trainer's host has the model."""
_MOST_VALUES = 50  # of data.metrics_column; each is a metric of every step, and a curve of the report


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a run.

    Example: Prompt("17-9f2c41d0", "6 * 7 =", (48, 25, 16), "42", {"level": 1}, ({"role": "", "content": "6 * 7 ="},),
    row_prompt="6 * 7 =")
    """

    prompt_id: str
    text: str
    """The text that was tokenized, after the chat template."""
    tokens: tuple[int, ...]
    answer: str | None
    """None if the row has none, which only rows that no scorer reads may do."""
    extra: dict[str, object]
    """Further columns that the row has, as JSON values."""
    messages: tuple[Message, ...]
    """Messages that the chat template rendered as `text`, including the system prompt. Without a template, or with an
    environment's first messages, one message with an empty role and the whole text."""
    row_prompt: RowPrompt
    """The prompt of the row itself, before system prompt and chat template: its text, or its list of messages."""
    answer_is_integer: bool = False
    """Whether the data has the answer as an integer, of which `answer` is the text."""

    def read_as(self, tokens: Sequence[int], tokenizer: Tokenizer) -> "Prompt":
        """Returns the prompt whose `tokens` the model reads: those of the row with an environment's first messages."""
        if (tokens := tuple(tokens)) == self.tokens:
            return self
        text = tokenizer.decode(list(tokens), skip_special_tokens=False)
        if tokens[: len(self.tokens)] == self.tokens:  # keeps the row's text, which decoding may change
            text = self.text + text.removeprefix(tokenizer.decode(list(self.tokens), skip_special_tokens=False))
        return replace(self, tokens=tokens, text=text, messages=({"role": "", "content": text},))


class Prompts:
    """Prompts in file order."""

    def __init__(self, rows: Sequence[PromptRow]):
        self._rows = rows
        digest = hashlib.blake2b(digest_size=16)
        for row in rows:
            digest.update(row.number.to_bytes(8, "little") + row.content_hash)
        # The offsets of the rows: without them, the same tokens cut into other rows would have the same digest.
        digest.update(np.cumsum([0, *(row.num_tokens for row in rows)], dtype="<i8").tobytes())
        for row in rows:
            digest.update(row.tokens.astype("<u4").tobytes())
        self.digest = digest.hexdigest()
        """128-bit hex digest of everything a run sees of these prompts: rows, order and token ids."""

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Prompt:
        row = self._rows[index]
        tokens = tuple(row.tokens.tolist())
        return Prompt(
            *(row.prompt_id, row.text, tokens, row.answer, row.extra, row.messages, row.row_prompt),
            answer_is_integer=row.answer_is_integer,
        )

    def require_used(self, config: Config, source: str) -> None:
        """Checks that some row has each further column that the agent or a scorer reads, and that a chat template of
        the config is used: by all rows, or by an environment. `source` names the prompts.

        Raises:
            InvalidInput: The message names the key.
        """
        if config.data.chat_template and not config.environment and any(row.render is None for row in self._rows):
            raise InvalidInput(
                f"data.chat_template is set, but {source} has text prompts: set data.chat to template them",
                field="data.chat_template",
            )
        agent = config.environment if isinstance(config.environment, AgentEnvironmentConfig) else None
        wanted = [("environment.columns", name) for name in (agent.columns if agent else ()) if name != "prompt"]
        for key, column in [*wanted, *config.reward.columns_read]:
            if not any(column in row.extra for row in self._rows):
                has = ", ".join(self[0].extra) or "no further column"
                raise InvalidInput(
                    f"{key}: no row of {source} has {column!r} as a further column. The first row has: {has}. To use "
                    "the column of prompts or answers, list it in data.extra_columns",
                    field=key,
                )


@dataclass(frozen=True)
class PromptDataset:
    """The training prompts, and the order that assigns them to the steps' batches."""

    prompts: Prompts
    order: EpochOrder

    @classmethod
    def load(cls, config: DataConfig, tokenizer: Tokenizer, *, seed: int, needs_answer: bool = True) -> "PromptDataset":
        """Reads, checks and tokenizes `config.train`; rows without an answer only if no scorer `needs_answer`.

        Raises:
            LockstepError: See RowFile.train.
        """
        rows, order = (PromptFile if needs_answer else AnswerlessFile).train(config, tokenizer, seed)
        _require_few_values(config, rows)
        return cls(Prompts(rows), order)

    @property
    def digest(self) -> str:
        return self.prompts.digest

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int) -> list[Prompt]:
        """Returns the `prompts_per_step` prompts of `step`, all distinct. Needs no state to resume."""
        return [self.prompts[int(index)] for index in self.order.indices(step)]


def load_eval(config: DataConfig, tokenizer: Tokenizer, *, needs_answer: bool = True) -> dict[str, Prompts]:
    """Returns the held-out prompts by set name, each set in file order. See PromptDataset.load."""
    held_out = (PromptFile if needs_answer else AnswerlessFile).held_out(config, tokenizer)
    for rows in held_out.values():
        _require_few_values(config, rows)
    return {name: Prompts(rows) for name, rows in held_out.items()}


def value_name(value: object) -> str:
    """Returns data.metrics_column, or a value of it, as a part of a metric's name; a slash would separate parts."""
    return str(value).replace("/", "|")


def _require_few_values(config: DataConfig, rows: Sequence[PromptRow]) -> None:
    column = config.metrics_column
    if column is None:
        return
    values = {str(row.extra.get(column)) for row in rows}
    if len(values) > _MOST_VALUES:
        raise InvalidInput(
            f"data.metrics_column: column {column!r} has {len(values)} values, more than {_MOST_VALUES}: name a column "
            "with few values, such as a task or a level",
            field="data.metrics_column",
        )
    named: dict[str, str] = {}
    for value in values:
        if (other := named.setdefault(value_name(value), value)) != value:
            both = " and ".join(map(repr, sorted((value, other))))
            raise InvalidInput(
                f"data.metrics_column: {both} of column {column!r} would be one metric, since a name has | for /: "
                "change one of them",
                field="data.metrics_column",
            )


Data = TypeVar("Data")
ConfigT = TypeVar("ConfigT", bound=AnyConfig)
Load = Callable[[ConfigT, Tokenizer], Data]
"""Reads the data that a config names, with the tokenizer of its model."""


def load_if_local(config: ConfigT, load: Load[ConfigT, Data], *, model_is_remote: bool) -> Data | None:
    """Returns the run's data; None if only the trainer's host has the model.

    Raises:
        LockstepError: The model's directory cannot be used, or `load` raised it.
    """
    if model_is_remote and not Path(config.model).is_dir():
        return None
    read_model_card(config.model)
    return _load(config, Path(config.model), load)


def load_from_card(config: ConfigT, card: ModelCard, load: Load[ConfigT, Data]) -> Data:
    """Returns the run's data, read with the model card that the trainer sent."""
    directory = config.run_dir / MODEL_CARD
    directory.mkdir(exist_ok=True)
    write_model_card(card, directory)
    return _load(config, directory, load)


def _load(config: ConfigT, model: Path, load: Load[ConfigT, Data]) -> Data:
    return load(config, Tokenizer.load(model, chat_template=config.data.chat_template, date=config.data.template_date))


# Second word of the spawn key. The orders of epochs use keys of one word.
REFILLS = 1


def prompts_to_try(
    data: PromptDataset, config: Config, step: int, success_rates: Callable[[int, int | None], Mapping[str, float]]
) -> Iterator[Prompt]:
    """Yields every prompt of `data` once, in the order in which `step`, counted from 0, tries them; `success_rates` is
    Ledger.success_rates, or a function like it."""
    prompts, curriculum = plain_order(data, seed=config.seed, step=step), config.selection.curriculum
    if not curriculum.enabled:
        return prompts
    return by_success_rate(prompts, success_rates(step, curriculum.window), curriculum)


def require_enough(num_prompts: int, config: Config) -> None:
    """Raises InvalidInput if a step would sample more than `num_prompts` prompts concurrently."""
    per_step, over_sampling = config.data.prompts_per_step, config.selection.over_sampling
    if over_sampling.at_once(per_step) > num_prompts:
        raise InvalidInput(
            f"data.prompts_per_step {per_step} x selection.over_sampling.factor {over_sampling.factor:g} = "
            f"{over_sampling.at_once(per_step)} prompts at once, but data.train has {num_prompts}; lower one",
            field="selection.over_sampling.factor",
        )


def plain_order(data: PromptDataset, *, seed: int, step: int) -> Iterator[Prompt]:
    """Yields every prompt of `data` once: the batch of `step`, then the rest, shuffled for this step only.

    How many of the rest a step takes does not change the batches of later steps.
    """
    batch = data.batch(step)
    yield from batch
    taken = {prompt.prompt_id for prompt in batch}
    for index in shuffled(len(data), seed, step, REFILLS).tolist():
        prompt = data.prompts[index]
        if prompt.prompt_id not in taken:
            yield prompt


def by_success_rate(
    prompts: Iterator[Prompt], rates: Mapping[str, float], config: CurriculumConfig
) -> Iterator[Prompt]:
    """Yields prompts with a rate in low..high or with no rate first, then the others, nearest to that band first.

    The order of `prompts` is kept among equals. `rates` are fractions of samples that passed so far, by prompt id.
    """
    outside: list[tuple[float, Prompt]] = []
    for prompt in prompts:
        rate = rates.get(prompt.prompt_id, config.low)
        distance = max(config.low - rate, rate - config.high)
        if distance > 0:
            outside.append((distance, prompt))
        else:
            yield prompt
    yield from (prompt for _, prompt in sorted(outside, key=lambda pair: pair[0]))
