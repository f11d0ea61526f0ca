"""Reads files of prompts and responses, or of conversations, whose assistant turns are trained on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from services.common.config.sft import SftDataConfig
from services.common.errors import InvalidInput
from services.coordinator.data.reading.bad_rows import BadRow
from services.coordinator.data.reading.columns import (
    as_conversation,
    as_messages,
    is_messages,
    is_prompt,
    is_text,
    require,
)
from services.coordinator.data.reading.files import Limits, Row, RowFile, hash_of
from services.coordinator.data.reading.record import Record
from services.coordinator.text.chat_template import Message, TemplateRefusal
from services.coordinator.text.prefix_stable import check_prefix_stable


@dataclass(frozen=True, slots=True)
class Example:
    """Holds one tokenized row. The loss covers the tokens of the assistant's answers, including the end token of each.

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
        """Returns the length of prompt and answers together."""
        return len(self.prompt_tokens) + len(self.tokens)


class SftFile(RowFile[SftDataConfig, Row, Example]):
    """Reads a file with a prompt and a response column, or with one column of conversations."""

    noun = "rows"

    @classmethod
    def _limits(cls, config: SftDataConfig) -> Limits:
        per_step = ("samples_per_step", config.samples_per_step)
        return Limits(per_step, ("max_tokens", config.max_tokens), config.max_eval_rows)

    def _check_columns(self) -> pa.DataType:
        if self.config.messages_column:
            return self._checked("messages_column", is_messages, "not a list of {role, content}")
        kind = self._checked("prompt_column", is_prompt, "not text or a list of {role, content}")
        self._checked("response_column", is_text, "not text")
        return kind

    def _check_template(self) -> None:
        super()._check_template()
        self._end = [] if self.is_templated else [self._end_token()]  # a chat template adds the end token itself

    def _checked(self, name: str, is_right: Callable[[pa.DataType], bool], problem: str) -> pa.DataType:
        column, key = getattr(self.config, name), f"data.{name}"
        kind = self._type(column, key)
        self._require(is_right(kind), column, key, problem)
        return kind

    def _read(self, where: str, number: int, record: Record) -> Row:
        config = self.config
        if config.messages_column:
            content = record[config.messages_column]
            messages = as_conversation(content)
        else:
            content = prompt, response = record[config.prompt_column], record[config.response_column]
            require(response, "response")
            messages = [*as_messages(prompt), {"role": "assistant", "content": response}]
        try:
            pieces = self._pieces(messages) if self.is_templated else [message["content"] for message in messages]
        except TemplateRefusal:  # only this row is bad; any other error of the template affects all rows
            raise
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error.message}", reason=error.reason, **error.metadata) from error
        return Row(where, number, hash_of(content), tuple(pieces))

    def _pieces(self, messages: Sequence[Message]) -> list[str]:
        """Splits a conversation that ends with an assistant's turn; texts 1, 3, ... are trained on."""
        messages = self._with_system(messages)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if self.config.train_on == "last" or not self.config.messages_column:
            turns = turns[-1:]
        whole = self._render(messages, is_prompt=False)
        pieces: list[str] = []
        end = 0
        for turn in turns:
            prompt, turns_end = self._render(messages[:turn], is_prompt=True), whole
            if turn < len(messages) - 1:
                turns_end = self._render(messages[: turn + 1], is_prompt=False)
            if not (whole.startswith(turns_end) and turns_end.startswith(prompt) and len(prompt) >= end):
                check_prefix_stable(self.tokenizer, messages, **self.config.chat_template_kwargs)
                raise BadRow(f"the chat template does not put message {turn} after the messages before it")
            pieces += [whole[end : len(prompt)], whole[len(prompt) : len(turns_end)]]
            end = len(turns_end)
        return pieces

    def _example(self, row: Row, pieces: list[list[int]]) -> Example:
        """Builds the example. Text after an answer's end token comes from the template, so it is not trained on."""
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
            if len(ends) != 1:
                problem = f"has {len(ends)} end tokens" if ends else "is not followed by an end token of the model"
                raise BadRow(f"answer {index // 2} {problem}; it must have exactly one")
            first, num_trained = len(tokens) - len(piece), len(tokens) - len(piece) + ends[0] + 1
            mask[first:num_trained] = [True] * (num_trained - first)
        arrays = (pieces[0], np.uint32), (tokens[:num_trained], np.uint32), (mask[:num_trained], np.bool_)
        return Example(row.prompt_id, *(np.array(values, dtype) for values, dtype in arrays))

    def _end_token(self) -> int:
        """Returns the token that ends a response without a chat template."""
        text = self.config.end_token
        known = {self.tokenizer.decode([i], skip_special_tokens=False): i for i in self.tokenizer.eos_token_ids}
        if text is None and len(known) == 1:
            return next(iter(known.values()))
        if text in known:
            return known[text]
        problem = (
            "is not set and the model has several end tokens"
            if text is None
            else f"{text!r} is not an end token of the model"
        )
        raise InvalidInput(f"data.end_token {problem}: set it to one of {', '.join(known)}", field="data.end_token")
