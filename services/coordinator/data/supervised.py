"""Reads files of prompts and responses, or of conversations, whose assistant turns are trained on."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from services.common.batches import SAMPLE_SCHEMA
from services.common.config.sft import SftDataConfig
from services.common.errors import InvalidInput
from services.coordinator.data.order import EpochOrder
from services.coordinator.data.reading import columns
from services.coordinator.data.reading.files import Row, RowFile, hash_of, require_messages_shown
from services.coordinator.data.reading.record import BadRow, Record, in_words
from services.coordinator.text.bridge import map_texts
from services.coordinator.text.chat_template import Message, TemplateRefusal, check_prefix_stable
from services.coordinator.text.continued import encode_marked_continued
from services.coordinator.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# What an answer may have beside its content, with the keys of a message that name it.
_BESIDE_CONTENT = {"reasoning": ("reasoning_content", "reasoning", "thinking"), "calls": ("tool_calls",)}


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
    """Returns messages as templates take them, without `train` and `weight`, and the indices of those to train on."""
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


def _require_shown(render: Callable[..., str], messages: Sequence[Message], text: str) -> None:
    """Raises BadRow if `text`, in which the last message is an answer, is the same without its reasoning or calls."""
    *before, answer = messages
    for what, keys in _BESIDE_CONTENT.items():
        said = filter(None, map(answer.get, keys))
        if all(isinstance(one, str) and one.strip() in answer["content"] for one in said):
            continue  # there is none, or the content has it too
        less = {key: value for key, value in answer.items() if key not in keys}
        with suppress(TemplateRefusal):
            if render([*before, less], add_generation_prompt=False) == text:
                raise BadRow(
                    f"the chat template leaves out the {what} of message {len(before)}: set data.chat_template to one "
                    f"that shows it, or remove {' and '.join(filter(answer.get, keys))}"
                )


def _schemas(tools: object) -> list[dict[str, object]]:
    """Returns the tools of a row, which are a list of schemas or its JSON."""
    try:
        schemas = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools or []
    except ValueError as error:
        raise BadRow(f"the tools are not JSON: {error}") from error
    if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in schemas):
        raise BadRow(
            f"the tools are {in_words(schemas)}, not a list of JSON schemas: data.tools_column=null ignores them"
        )
    return schemas


@dataclass(frozen=True, slots=True)
class SftRow(Row):
    """A row. `marked` are its answers (pieces 1, 3, ...) with marks in place of the end tokens that they quote, which
    stay text (Tokenizer.as_text); it is empty if they quote none.
    """

    marked: tuple[str, ...] = ()


class SftFile(RowFile[SftDataConfig, SftRow, Example]):
    """A file with a prompt and a response column, or with one column of conversations."""

    noun, keys = "rows", ("samples_per_step", "max_tokens", "max_eval_rows")
    of_templates = (*RowFile.of_templates, "chat_template")

    def _check_columns(self) -> pa.DataType:
        if self.config.tools_column and "tools_column" in self.config.model_fields_set:
            self._type(self.config.tools_column, "data.tools_column")
        if self.config.messages_column:
            return self._checked("messages_column", columns.is_messages, "not a list of {role, content}")
        chats = [name for name, kind in self._file.types.items() if columns.is_messages(kind)]
        if chats and {self.config.prompt_column, self.config.response_column}.isdisjoint(self._file.types):
            message = f"{self.path} has conversations in {chats[0]}: set data.messages_column={chats[0]}"
            raise InvalidInput(f"data.messages_column: {message}", field="data.messages_column")
        kind = self._checked("prompt_column", columns.is_prompt, "not text or a list of {role, content}")
        one = "put prompt and response into one column of messages, and name that in data.messages_column"
        self._checked("response_column", columns.is_text, f"not text: if it has messages, {one}")
        return kind

    def _check_template(self) -> None:
        super()._check_template()
        column = self.config.tools_column
        if column in self._file.types and not self.is_templated:
            message = f"data.tools_column: only a chat template shows tools, but {self.path} has text prompts"
            if "tools_column" in self.config.model_fields_set:
                raise InvalidInput(f"{message}: set data.chat to template them", field="data.tools_column")
            log.warning("%s: its column %s is ignored", message, column)
        decode, ends = self.tokenizer.decode, self.tokenizer.eos_token_ids
        self._stops = {text: end for end in ends if (text := decode([end], skip_special_tokens=False))}
        stop = "|".join(map(re.escape, sorted(self._stops, key=len, reverse=True))) or "(?!)"
        self._stop, self._last_stops = re.compile(stop), re.compile(rf"(?:(?:{stop})\s*)+\Z")
        self._end = [] if self.is_templated else [self._end_token()]  # a chat template adds the end token itself

    def _checked(self, name: str, is_right: Callable[[pa.DataType], bool], problem: str) -> pa.DataType:
        column, key = getattr(self.config, name), f"data.{name}"
        kind = self._type(column, key)
        self._require(is_right(kind), column, key, problem)
        return kind

    def _read(self, where: str, number: int, record: Record) -> SftRow:
        config, tools = self.config, record.get(self.config.tools_column or "")
        if config.messages_column:
            content: object = record.get(config.messages_column)
            messages, trained = _without_flags(columns.as_conversation(content))
        else:
            content = prompt, response = record.get(config.prompt_column), record.get(config.response_column)
            columns.require(response, "response")
            if not self.is_templated and isinstance(prompt, list):
                raise BadRow("the prompt is a list, but the file's first one is text: set data.chat to have both")
            messages = [*columns.as_messages(prompt), {"role": "assistant", "content": response}]
            trained = [len(messages) - 1]
        if self.is_templated and tools:
            content = [content, tools]
        marked = [self._with_marks(message) if index in trained else message for index, message in enumerate(messages)]
        try:
            pieces = self._pieces(messages, trained, tools)
            quoting = self._pieces(marked, trained, tools) if marked != messages else []
        except TemplateRefusal:  # only this row is bad; any other error of the template affects all rows
            raise
        except InvalidInput as error:
            fix = "; data.train_on=last trains on the last answer only" if len(trained) > 1 else ""
            raise InvalidInput(f"{where}: {error.message}{fix}", reason=error.reason, **error.metadata) from error
        if quoting and [self._unmarked(piece) for piece in quoting] != pieces:
            raise BadRow("the chat template changes an end token that an answer quotes")
        self._check_answers([marked[index]["content"] for index in trained], quoting or pieces)
        return SftRow(where, number, hash_of(content), tuple(pieces), tuple(quoting[1::2]))

    def _with_marks(self, message: Message) -> Message:
        """Returns a message with marks in place of the end tokens that it quotes, which are all but the last ones."""
        content = self._last_stops.sub("", message["content"])

        def mark(text: str) -> str:
            return self.tokenizer.as_text(text, self._stops) if self._stop.search(text) else text

        return {**map_texts(mark, message), "content": mark(content) + message["content"][len(content) :]}

    def _unmarked(self, piece: str) -> str:
        for stop in self._stops:
            piece = piece.replace(self.tokenizer.as_text(stop, [stop]), stop)
        return piece

    def _check_answers(self, answers: Sequence[str], pieces: Sequence[str]) -> None:
        """Raises BadRow if an answer ends with an end token and the chat template writes another, or if its text is not
        all before the end token, but for white space. The prompt may have its beginning, such as <think>.
        """
        answers = answers[-(len(pieces) // 2) :]
        for index, (answer, before, piece) in enumerate(zip(answers, pieces[::2], pieces[1::2], strict=False)):
            ends = [match.end() for match in self._stop.finditer(piece)]
            if len(ends) > 1 and self._last_stops.search(answer):
                raise BadRow(f"answer {index} has {len(ends)} end tokens; it must have exactly one")
            said, prompt, shown = (
                "".join(text.split()) for text in (answer, before, piece[: ends[0] if ends else None])
            )
            if said not in prompt[max(0, len(prompt) - len(said) + 1) :] + shown:
                raise BadRow(
                    f"the chat template leaves out or changes a part of answer {index}, {answer[:40]!r}, such as its "
                    "thinking: set data.chat_template to one that keeps it"
                )

    def _pieces(self, messages: Sequence[Message], trained: Sequence[int], tools: object) -> list[str]:
        """Splits a conversation that ends with an assistant's turn; texts 1, 3, ... are the `trained` messages."""
        if not self.is_templated:
            return [message["content"] for message in messages]
        tokenizer = self.tokenizer.with_tools(_schemas(tools))
        num_messages, messages = len(messages), self._with_system(messages)
        turns = [len(messages) - num_messages + index for index in trained]
        if self.config.train_on == "last":
            turns = [turn for turn in turns if turn == len(messages) - 1]
        if not turns:
            raise BadRow("no message of the assistant is to be trained on: all have train false or weight 0")
        render = partial(tokenizer.render, **self.config.chat_template_kwargs)
        whole = render(messages, add_generation_prompt=False)
        require_messages_shown(partial(render, add_generation_prompt=False), messages)
        pieces: list[str] = []
        end = 0
        for turn in turns:
            prompt, turns_end = render(messages[:turn]), whole
            if turn < len(messages) - 1:
                turns_end = render(messages[: turn + 1], add_generation_prompt=False)
            if not (whole.startswith(turns_end) and turns_end.startswith(prompt) and len(prompt) >= end):
                check_prefix_stable(render, messages)
                raise BadRow(f"the chat template does not put message {turn} after the messages before it")
            _require_shown(render, messages[: turn + 1], turns_end)
            pieces += [whole[end : len(prompt)], whole[len(prompt) : len(turns_end)]]
            end = len(turns_end)
        return pieces

    def _example(self, row: SftRow, pieces: list[list[int]]) -> Example:
        """Builds the example. Text after an answer's end token comes from the template, so it is not trained on.

        That may be another end token: templates of Phi-3 write one after each turn, and one after the conversation.
        """
        if row.marked:
            pieces[1::2] = self._encode_quoting(row, pieces)
        if self._end and pieces[-1][-1:] != self._end:
            pieces[-1] = pieces[-1] + self._end
        tokens: list[int] = []
        mask: list[bool] = []
        num_trained = 0
        for index, piece in enumerate(pieces[1:]):
            tokens += piece
            mask += [False] * len(piece)
            if index % 2:
                continue
            ends = [place for place, token in enumerate(piece) if token in self.tokenizer.eos_token_ids]
            if not ends or (self._end and len(ends) > 1):
                problem = f"has {len(ends)} end tokens" if ends else "is not followed by an end token of the model"
                raise BadRow(f"answer {index // 2} {problem}; it must have exactly one")
            first, num_trained = len(tokens) - len(piece), len(tokens) - len(piece) + ends[0] + 1
            mask[first:num_trained] = [True] * (num_trained - first)
        arrays = (pieces[0], np.uint32), (tokens[:num_trained], np.uint32), (mask[:num_trained], np.bool_)
        return Example(row.prompt_id, *(np.array(values, dtype) for values, dtype in arrays))

    def _encode_quoting(self, row: SftRow, pieces: Sequence[list[int]]) -> list[list[int]]:
        """Returns the tokens of answers that quote end tokens; `pieces` are those that the text has without marks."""
        quoting: list[list[int]] = []
        for index, (before, text, plain) in enumerate(zip(row.pieces[::2], row.marked, pieces[1::2], strict=False)):
            try:
                quoting.append(encode_marked_continued(self.tokenizer, before, text))
            except InvalidInput as error:
                raise BadRow(f"answer {index} quotes an end token: {error.message}") from error
            texts = [self.tokenizer.decode(ids, skip_special_tokens=False).split() for ids in (quoting[-1], plain)]
            if "".join(texts[0]) != "".join(texts[1]):
                raise BadRow(f"answer {index} quotes an end token, which the vocabulary has no other tokens for")
        return quoting

    def _end_token(self) -> int:
        text = self.config.end_token
        if text is None and len(self._stops) == 1:
            return next(iter(self._stops.values()))
        if text in self._stops:
            return self._stops[text]
        problem = "is not set and the model has several end tokens"
        if text is not None:
            problem = f"{text!r} is not an end token of the model"
        raise InvalidInput(
            f"data.end_token {problem}: set it to one of {', '.join(self._stops)}", field="data.end_token"
        )


class SftDataset:
    """The training rows in file order, and the order that assigns them to the steps' batches."""

    def __init__(self, examples: Sequence[Example], order: EpochOrder):
        self.examples, self._order = examples, order
        self.digest = digest_of(examples)

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
