"""Rows of a supervised run, tokenised once. A step's batch follows from (dataset, seed, step) alone."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from services.common.batch import SAMPLE_SCHEMA
from services.common.config.sft import SftDataConfig
from services.common.errors import InvalidInput
from services.coordinator.data.bad_rows import BadRow, BadRows
from services.coordinator.data.order import EpochOrder
from services.coordinator.data.sft_rows import SftFile, SftRow
from services.coordinator.data.tokenizer import Tokenizer

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Example:
    """One row. The loss is on the tokens of the assistant's answers, the end token of each included.

    Example: for the conversation "2+2=", "4", "And 3+3=", "6": prompt_tokens are those of "2+2=", tokens those of
    "4<end>And 3+3=6<end>", and loss_mask is false on "And 3+3=".
    """

    prompt_id: str
    prompt_tokens: np.ndarray
    """uint32: up to the first answer that is trained on."""
    tokens: np.ndarray
    """uint32: from there to the end of the last."""
    loss_mask: np.ndarray
    """bool, one for each of `tokens`."""

    @property
    def num_tokens(self) -> int:
        """Of all of it."""
        return len(self.prompt_tokens) + len(self.tokens)


class SftDataset:
    """Training rows in the order of their files, cut into the batches of the run's steps."""

    def __init__(self, examples: Sequence[Example], order: EpochOrder):
        self.examples, self._order = examples, order
        digest = hashlib.blake2b(digest_size=16)
        for example in examples:
            digest.update(f"{example.prompt_id} {len(example.prompt_tokens)} {len(example.tokens)}\n".encode())
            for part in (example.prompt_tokens, example.tokens, example.loss_mask):
                digest.update(part.astype(part.dtype.newbyteorder("<")).tobytes())
        self.digest = digest.hexdigest()
        """128-bit hash, as hex, of rows, order, token ids and masks: all that a run sees of this data."""

    @classmethod
    def load(cls, config: SftDataConfig, tokenizer: Tokenizer, *, seed: int) -> "SftDataset":
        """Reads, checks and tokenises `config.train`.

        Raises:
            NotFound: A file does not exist.
            InvalidInput: A file or its rows cannot be used, or there are too few rows for one batch.
        """
        examples = _read(config.train, config, tokenizer, field="data.train")
        if config.samples_per_step > len(examples):
            message = f"data.samples_per_step is {config.samples_per_step}, but data.train has {len(examples)} rows"
            raise InvalidInput(message, field="data.samples_per_step")
        return cls(examples, EpochOrder(len(examples), config.samples_per_step, seed=seed, shuffle=config.shuffle))

    def __len__(self) -> int:
        return len(self.examples)

    def num_steps(self, num_epochs: int) -> int:
        """Batches after which every row was in at least `num_epochs`."""
        return -(-num_epochs * len(self) // self._order.prompts_per_step)

    def batch(self, step: int) -> pa.Table:
        """The batch of `step` (common.batch.SAMPLE_SCHEMA), rows all different; to resume is to ask for the next step.

        Raises:
            ValueError: `step` is negative.
        """
        return to_table([self.examples[index] for index in self._order.indices(step).tolist()], version=step)


def load_held_out(config: SftDataConfig, tokenizer: Tokenizer) -> dict[str, list[Example]]:
    """The held-out rows by name, each set in the order of its file.

    Raises:
        NotFound: A file does not exist.
        InvalidInput: A file or its rows cannot be used.
    """
    return {
        name: _read((path,), config, tokenizer, field=f"data.eval.{name}", max_rows=config.max_eval_rows)
        for name, path in config.eval.items()
    }


def to_table(examples: Sequence[Example], *, version: int) -> pa.Table:
    """Examples as samples, each a group of its own, to train the policy of `version`: it drew none of them, so that
    there is no digest and the log-probabilities are zero."""
    num = len(examples)
    columns = {
        "prompt_id": [example.prompt_id for example in examples],
        "group": range(num),
        "sample": [0] * num,
        "prompt_tokens": [example.prompt_tokens for example in examples],
        "tokens": [example.tokens for example in examples],
        "logprobs": [np.zeros(len(example.tokens), np.float32) for example in examples],
        "loss_mask": [example.loss_mask for example in examples],
        "reward": [0.0] * num,
        "components": [[]] * num,
        "finish_reason": ["stop"] * num,
        "policy_version": [version] * num,
        "policy_digest": [""] * num,
        "scorer": [""] * num,
        "seed": [0] * num,
    }
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else pa.nulls(num, field.type)
        for field in SAMPLE_SCHEMA
    ]
    return pa.table(arrays, schema=SAMPLE_SCHEMA)


def _read(
    paths: Sequence[Path], config: SftDataConfig, tokenizer: Tokenizer, *, field: str, max_rows: int | None = None
) -> list[Example]:
    limit = config.max_tokens
    bad = BadRows(field, "bad", "Mend them, or set data.bad_rows=drop")
    overlong = BadRows(field, f"above data.max_tokens {limit}", "Raise it, or set data.overlong=drop")
    kept: list[Example] = []
    num_rows = 0
    for path in paths:
        file = SftFile(path, config, tokenizer, field=field, max_rows=max_rows)
        rows = file.rows(bad, first_number=num_rows)
        num_rows += file.num_rows
        for row, example in _tokenise(rows, file, bad):
            if example.num_tokens > limit:
                overlong.add(row.where, f"{example.num_tokens} tokens")
            else:
                kept.append(example)
    bad.settle(config.bad_rows, total=num_rows, field=field)
    overlong.settle(config.overlong, total=num_rows, field="data.max_tokens")
    if not kept:
        raise InvalidInput(f"{field}: no rows left of {num_rows} in {', '.join(map(str, paths))}", field=field)
    return kept


def _tokenise(rows: Iterator[SftRow], file: SftFile, bad: BadRows) -> Iterator[tuple[SftRow, Example]]:
    tokenizer = file.tokenizer
    # A template writes its own special tokens.
    add_special_tokens = file.config.add_special_tokens and not file.is_templated
    end = [] if file.is_templated else [_end_token(file)]
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        prompts = tokenizer.encode_batch([row.pieces[0] for row in chunk], add_special_tokens=add_special_tokens)
        later = iter(tokenizer.encode_batch([piece for row in chunk for piece in row.pieces[1:]]))
        for row, prompt in zip(chunk, prompts, strict=True):
            pieces = [prompt, *islice(later, len(row.pieces) - 1)]
            pieces[-1] = pieces[-1] + end
            try:
                yield row, _example(row, pieces, tokenizer.eos_token_ids)
            except BadRow as error:
                bad.add(row.where, error)


def _example(row: SftRow, pieces: Sequence[list[int]], eos_token_ids: Iterable[int]) -> Example:
    """Pieces as in SftRow. What follows an end token in an answer's piece is the template's, which no model writes."""
    if not pieces[0]:
        raise BadRow("the prompt has no tokens")
    tokens: list[int] = []
    mask: list[bool] = []
    num_trained = 0
    for index, piece in enumerate(pieces[1:]):
        tokens += piece
        mask += [False] * len(piece)
        if index % 2:
            continue
        ends = [place for place, token in enumerate(piece) if token in eos_token_ids]
        if len(ends) != 1:
            problem = f"holds {len(ends)} end tokens" if ends else "is not followed by an end token of the model"
            raise BadRow(f"answer {index // 2} {problem}, where one ends it")
        first, num_trained = len(tokens) - len(piece), len(tokens) - len(piece) + ends[0] + 1
        mask[first:num_trained] = [True] * (num_trained - first)
    prompt_id = f"{row.number}-{row.content_hash.hex()[:8]}"
    kept = slice(num_trained)
    return Example(
        prompt_id, np.array(pieces[0], np.uint32), np.array(tokens[kept], np.uint32), np.array(mask[kept], np.bool_)
    )


def _end_token(file: SftFile) -> int:
    """What ends a response that is not templated."""
    tokenizer, text = file.tokenizer, file.config.end_token
    known = {tokenizer.decode([token], skip_special_tokens=False): token for token in tokenizer.eos_token_ids}
    if text is None and len(known) == 1:
        return next(iter(known.values()))
    if text in known:
        return known[text]
    problem = "is not set and the model has several end tokens" if text is None else f"{text!r} ends no sample"
    raise InvalidInput(f"data.end_token {problem}: set it to one of {', '.join(known)}", field="data.end_token")
