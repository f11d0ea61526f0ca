"""Prompts of a run. The batch of a step follows from (dataset, seed, step) alone: there is no loader state to save."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np

from services.common.config.data import DataConfig
from services.common.errors import InvalidInput
from services.coordinator.data.bad_rows import BadRows
from services.coordinator.data.order import EpochOrder
from services.coordinator.data.rows import PromptFile, Row
from services.coordinator.data.tokenizer import Tokenizer

_PROMPTS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Example: Prompt("17-9f2c41d0", "Q: 17 + 25 = ?", (48, 25, 16), "42", {"level": 1})
    """

    prompt_id: str
    """`<row>-<hash of the row>`: unique in its dataset, and the same whatever the model and the template."""
    text: str
    """What was tokenised, template included."""
    tokens: tuple[int, ...]
    answer: str
    extra: dict[str, Any]
    """Further columns, JSON-able."""


class Prompts(Sequence[Prompt]):
    """Prompts in the order of their files. Tokens lie in one flat array: a list of ints takes nine times the memory.

    Args:
        rows: What was read.
        tokens: uint32 [num_tokens], all prompts one after the other.
        offsets: int64 [len(rows) + 1], where each begins.
    """

    def __init__(self, rows: Sequence[Row], tokens: np.ndarray, offsets: np.ndarray):
        self._rows, self._tokens, self._offsets = rows, tokens, offsets
        digest = hashlib.blake2b(digest_size=16)
        for row in rows:
            digest.update(row.number.to_bytes(8, "little") + row.content_hash)
        digest.update(offsets.astype("<i8").tobytes())
        digest.update(tokens.astype("<u4").tobytes())
        self.digest = digest.hexdigest()
        """128-bit hash, as hex, of rows, order and token ids: all that a run sees of these prompts."""

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        row = self._rows[index]
        tokens = self._tokens[self._offsets[index] : self._offsets[index + 1]]
        prompt_id = f"{row.number}-{row.content_hash.hex()[:8]}"
        return Prompt(prompt_id, row.text, tuple(tokens.tolist()), row.answer, row.extra)


class PromptDataset:
    """Training prompts, cut into the batches of the run's steps."""

    def __init__(self, prompts: Prompts, order: EpochOrder):
        self.prompts = prompts
        self._order = order

    @classmethod
    def load(cls, config: DataConfig, tokenizer: Tokenizer, *, seed: int) -> "PromptDataset":
        """Reads, checks and tokenises `config.train`.

        Raises:
            NotFound: A file does not exist.
            InvalidInput: A file or its rows cannot be used, or there are too few rows for one batch.
        """
        prompts = _read(config.train, config, tokenizer, field="data.train")
        if config.prompts_per_step > len(prompts):
            message = f"data.prompts_per_step is {config.prompts_per_step}, but data.train has {len(prompts)} prompts"
            raise InvalidInput(message, field="data.prompts_per_step")
        return cls(prompts, EpochOrder(len(prompts), config.prompts_per_step, seed=seed, shuffle=config.shuffle))

    @property
    def digest(self) -> str:
        """See Prompts.digest."""
        return self.prompts.digest

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int) -> list[Prompt]:
        """The `prompts_per_step` prompts of `step`, all different; to resume is to ask for the next step.

        Raises:
            ValueError: `step` is negative.
        """
        return [self.prompts[int(index)] for index in self._order.indices(step)]


def load_eval(config: DataConfig, tokenizer: Tokenizer) -> dict[str, Prompts]:
    """The held-out prompts by name, each set in the order of its file.

    Raises:
        NotFound: A file does not exist.
        InvalidInput: A file or its rows cannot be used.
    """
    limit = config.max_eval_prompts
    return {
        name: _read((path,), config, tokenizer, field=f"data.eval.{name}", max_rows=limit)
        for name, path in config.eval.items()
    }


def _read(
    paths: Sequence[Path], config: DataConfig, tokenizer: Tokenizer, *, field: str, max_rows: int | None = None
) -> Prompts:
    limit = config.max_prompt_tokens
    bad = BadRows(field, "bad", "Mend them, or set data.bad_rows=drop")
    overlong = BadRows(field, f"above data.max_prompt_tokens {limit}", "Raise it, or set data.overlong=drop")
    kept: list[Row] = []
    lengths, tokens, num_rows = [0], [np.empty(0, np.uint32)], 0
    for path in paths:
        file = PromptFile(path, config, tokenizer, field=field, max_rows=max_rows)
        rows = file.rows(bad, first_number=num_rows)
        num_rows += file.num_rows
        for row, ids in _encode(rows, tokenizer, config.add_special_tokens and not file.is_templated):
            if not ids:
                bad.add(row.where, "the prompt has no tokens")
            elif len(ids) > limit:
                overlong.add(row.where, f"{len(ids)} tokens")
            else:
                kept.append(row)
                lengths.append(len(ids))
                tokens.append(np.asarray(ids, np.uint32))
    bad.settle(config.bad_rows, total=num_rows, field=field)
    overlong.settle(config.overlong, total=num_rows, field="data.max_prompt_tokens")
    if not kept:
        raise InvalidInput(f"{field}: no prompts left of {num_rows} rows in {', '.join(map(str, paths))}", field=field)
    return Prompts(kept, np.concatenate(tokens), np.cumsum(lengths))


def _encode(rows: Iterator[Row], tokenizer: Tokenizer, add_special_tokens: bool) -> Iterator[tuple[Row, list[int]]]:
    while chunk := list(islice(rows, _PROMPTS_AT_ONCE)):
        ids = tokenizer.encode_batch([row.text for row in chunk], add_special_tokens=add_special_tokens)
        yield from zip(chunk, ids, strict=True)
