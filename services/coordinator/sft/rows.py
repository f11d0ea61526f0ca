"""Reads files of prompts and responses, or of conversations, whose assistant turns are trained on."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from services.common.batches.batch import SAMPLE_SCHEMA
from services.common.config.sft import SftDataConfig
from services.common.errors import InvalidInput
from services.coordinator.data.order import EpochOrder
from services.coordinator.data.reading import columns
from services.coordinator.data.reading.files import Limits, Row, RowFile, hash_of
from services.coordinator.data.reading.record import BadRow, Record, in_words
from services.coordinator.text.chat_template import Message, TemplateRefusal, check_prefix_stable
from services.coordinator.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenized row. The loss covers the tokens of the assistant's answers, including the end token of each.

    Example: for the conversation "2+2=", "4", "And 3+3=", "6": prompt_tokens are those of "2+2=", tokens those of
    "4<end>And 3+3=6<end>", and loss_mask is false on "And 3+3=".
    """

    prompt_id: str
    prompt_tokens: np.ndarray
    """uint32, all tokens before the first answer that is trained on."""
    tokens: np.ndarray
    """uint32, the tokens from there to the end of the last answer that is trained on."""
    loss_mask: np.ndarray
    """bool, one per token of `tokens`."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_tokens) + len(self.tokens)


def _without_flags(messages: Sequence[Message]) -> tuple[list[Message], list[int]]:
    """Returns messages as templates take them, without `train` and `weight`, and the indices of those to train on.

    Raises:
        BadRow: A flag is none.
    """
    without_flags: list[Message] = []
    trained: list[int] = []
    for index, message in enumerate(messages):
        flags = [message[key] for key in ("train", "weight") if message.get(key) is not None]
        if not all(flag in (0, 1) for flag in flags):
            raise BadRow(f"message {index} has train or weight {flags}: give true or false, or 1 or 0")
        if message["role"] == "assistant" and all(flags):
            trained.append(index)
        without_flags.append({key: value for key, value in message.items() if key not in ("train", "weight")})
    return without_flags, trained


def _schemas(tools: object) -> list[dict[str, object]]:
    """Returns the tools of a row, which are a list of schemas or its JSON.

    Raises:
        BadRow: They are something else.
    """
    try:
        schemas = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools or []
    except ValueError as error:
        raise BadRow(f"the tools are not JSON: {error}") from error
    if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in schemas):
        raise BadRow(
            f"the tools are {in_words(schemas)}, not a list of JSON schemas: data.tools_column=null ignores them"
        )
    return schemas


class SftFile(RowFile[SftDataConfig, Row, Example]):
    """A file with a prompt and a response column, or with one column of conversations."""

    noun = "rows"
    of_templates = (*RowFile.of_templates, "chat_template")

    @classmethod
    def _limits(cls, config: SftDataConfig) -> Limits:
        per_step = ("samples_per_step", config.samples_per_step)
        return Limits(per_step, ("max_tokens", config.max_tokens), config.max_eval_rows)

    def _check_columns(self) -> pa.DataType:
        if self.config.tools_column and "tools_column" in self.config.model_fields_set:
            self._type(self.config.tools_column, "data.tools_column")
        if self.config.messages_column:
            return self._checked("messages_column", columns.is_messages, "not a list of {role, content}")
        kind = self._checked("prompt_column", columns.is_prompt, "not text or a list of {role, content}")
        self._checked("response_column", columns.is_text, "not text")
        return kind

    def _check_template(self) -> None:
        super()._check_template()
        column = self.config.tools_column
        if column in self._file.types and not self.is_templated:
            message = f"data.tools_column: only a chat template shows tools, but {self.path} has text prompts"
            if "tools_column" in self.config.model_fields_set:
                raise InvalidInput(f"{message}: set data.chat to template them", field="data.tools_column")
            log.warning("%s: its column %s is ignored", message, column)
        self._end = [] if self.is_templated else [self._end_token()]  # a chat template adds the end token itself

    def _checked(self, name: str, is_right: Callable[[pa.DataType], bool], problem: str) -> pa.DataType:
        column, key = getattr(self.config, name), f"data.{name}"
        kind = self._type(column, key)
        self._require(is_right(kind), column, key, problem)
        return kind

    def _read(self, where: str, number: int, record: Record) -> Row:
        config, tools = self.config, record.get(self.config.tools_column or "")
        if config.messages_column:
            content: object = record.get(config.messages_column)
            messages, trained = _without_flags(columns.as_conversation(content))
        else:
            content = prompt, response = record.get(config.prompt_column), record.get(config.response_column)
            columns.require(response, "response")
            messages = [*columns.as_messages(prompt), {"role": "assistant", "content": response}]
            trained = [len(messages) - 1]
        if self.is_templated and tools:
            content = [content, tools]
        try:
            if self.is_templated:
                pieces = self._pieces(messages, trained, self.tokenizer.with_tools(_schemas(tools)))
            else:
                pieces = [message["content"] for message in messages]
        except TemplateRefusal:  # only this row is bad; any other error of the template affects all rows
            raise
        except InvalidInput as error:
            fix = "; data.train_on=last trains on the last answer only" if len(trained) > 1 else ""
            raise InvalidInput(f"{where}: {error.message}{fix}", reason=error.reason, **error.metadata) from error
        return Row(where, number, hash_of(content), tuple(pieces))

    def _pieces(self, messages: Sequence[Message], trained: Sequence[int], tokenizer: Tokenizer) -> list[str]:
        """Splits a conversation that ends with an assistant's turn; texts 1, 3, ... are the `trained` messages."""
        num_messages, messages = len(messages), self._with_system(messages)
        turns = [len(messages) - num_messages + index for index in trained]
        if self.config.train_on == "last":
            turns = [turn for turn in turns if turn == len(messages) - 1]
        if not turns:
            raise BadRow("no message of the assistant is to be trained on: all have train false or weight 0")
        render = partial(tokenizer.render, **self.config.chat_template_kwargs)
        whole = render(messages, add_generation_prompt=False)
        pieces: list[str] = []
        end = 0
        for turn in turns:
            prompt, turns_end = render(messages[:turn]), whole
            if turn < len(messages) - 1:
                turns_end = render(messages[: turn + 1], add_generation_prompt=False)
            if not (whole.startswith(turns_end) and turns_end.startswith(prompt) and len(prompt) >= end):
                check_prefix_stable(tokenizer, messages, **self.config.chat_template_kwargs)
                raise BadRow(f"the chat template does not put message {turn} after the messages before it")
            pieces += [whole[end : len(prompt)], whole[len(prompt) : len(turns_end)]]
            end = len(turns_end)
        return pieces

    def _example(self, row: Row, pieces: list[list[int]]) -> Example:
        """Builds the example. Text after an answer's end token comes from the template, so it is not trained on."""
        if self._end and pieces[-1][-1:] != self._end:
            pieces[-1] = pieces[-1] + self._end
        pieces[1::2] = map(self._with_quotes, row.pieces[1::2], pieces[1::2])
        tokens: list[int] = []
        mask: list[bool] = []
        num_trained = 0
        for index, piece in enumerate(pieces[1:]):
            tokens += piece
            mask += [False] * len(piece)
            if index % 2:
                continue
            ends = [place for place, token in enumerate(piece) if token in self.tokenizer.eos_token_ids]
            if len(ends) != 1:
                problem = f"has {len(ends)} end tokens" if ends else "is not followed by an end token of the model"
                raise BadRow(f"answer {index // 2} {problem}; it must have exactly one")
            first, num_trained = len(tokens) - len(piece), len(tokens) - len(piece) + ends[0] + 1
            mask[first:num_trained] = [True] * (num_trained - first)
        arrays = (pieces[0], np.uint32), (tokens[:num_trained], np.uint32), (mask[:num_trained], np.bool_)
        return Example(row.prompt_id, *(np.array(values, dtype) for values, dtype in arrays))

    def _with_quotes(self, text: str, tokens: list[int]) -> list[int]:
        """Returns the tokens of an answer whose text quotes end tokens, which stay text: all but the last."""
        ends = self.tokenizer.eos_token_ids
        if sum(token in ends for token in tokens) < 2:
            return tokens
        stops = {self.tokenizer.decode([token], skip_special_tokens=False): token for token in ends}
        own = "".join(stop for stop, token in stops.items() if [token] == self._end)
        text = text if own and text.endswith(own) else text + own
        matches = list(re.finditer("|".join(map(re.escape, sorted(stops, key=len, reverse=True))), text))
        end = matches[-1].start()
        if len(matches) > 1 and matches[-2].end() == end:  # the text itself ends with one
            return tokens
        try:
            quoted = self.tokenizer.encode_marked(self.tokenizer.as_text(text[:end], stops) + text[end:])
        except InvalidInput:
            return tokens
        texts = [self.tokenizer.decode(ids, skip_special_tokens=False).split() for ids in (quoted, tokens)]
        # Otherwise the vocabulary has no other tokens for it.
        return quoted if "".join(texts[0]) == "".join(texts[1]) else tokens

    def _end_token(self) -> int:
        text = self.config.end_token
        known = {self.tokenizer.decode([i], skip_special_tokens=False): i for i in self.tokenizer.eos_token_ids}
        if text is None and len(known) == 1:
            return next(iter(known.values()))
        if text in known:
            return known[text]
        problem = "is not set and the model has several end tokens"
        if text is not None:
            problem = f"{text!r} is not an end token of the model"
        raise InvalidInput(f"data.end_token {problem}: set it to one of {', '.join(known)}", field="data.end_token")


class SftDataset:
    """The training rows in file order, and the order that assigns them to the steps' batches."""

    def __init__(self, examples: Sequence[Example], order: EpochOrder):
        self.examples, self._order = examples, order
        self.digest = digest_of(examples)
        """128-bit hex digest of all rows, in order: ids, tokens and masks."""

    @classmethod
    def load(cls, config: SftDataConfig, tokenizer: Tokenizer, *, seed: int) -> "SftDataset":
        """Reads, checks and tokenizes `config.train`. Raises like RowFile.train."""
        return cls(*SftFile.train(config, tokenizer, seed))

    def __len__(self) -> int:
        return len(self.examples)

    def num_steps(self, num_epochs: int) -> int:
        """Returns the number of batches after which every row was used at least `num_epochs` times."""
        return -(-num_epochs * len(self) // self._order.prompts_per_step)

    def batch(self, step: int) -> pa.Table:
        """Returns the batch of `step` (SAMPLE_SCHEMA); its rows are distinct. Needs no state to resume.

        Raises:
            ValueError: `step` is negative.
        """
        return to_table([self.examples[index] for index in self._order.indices(step).tolist()], version=step)


def digest_of(examples: Sequence[Example]) -> str:
    """Returns a 128-bit hex digest of rows, in order: ids, tokens and masks."""
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        digest.update(f"{example.prompt_id} {len(example.prompt_tokens)} {len(example.tokens)}\n".encode())
        for part in (example.prompt_tokens, example.tokens, example.loss_mask):
            digest.update(part.astype(part.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def to_table(examples: Sequence[Example], *, version: int) -> pa.Table:
    """Converts examples to samples, each in a group of its own, for training the policy of `version`.

    The policy did not generate them, so the digest is empty and the log-probabilities are zero.
    """
    unsampled = {"sample": 0, "reward": 0.0, "components": [], "finish_reason": "stop", "scorer": "", "seed": 0}
    stamp = {"policy_version": version, "policy_digest": ""}
    rows = [
        {
            **unsampled,
            **stamp,
            "prompt_id": example.prompt_id,
            "group": index,
            "prompt_tokens": example.prompt_tokens,
            "tokens": example.tokens,
            "logprobs": np.zeros(len(example.tokens), np.float32),
            "loss_mask": example.loss_mask,
        }
        for index, example in enumerate(examples)
    ]
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)
