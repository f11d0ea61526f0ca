"""The model's tokenizer as transformers loads it, with chat template and stop tokens."""

import datetime
import hashlib
import sys
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from pydantic import JsonValue

from services.common.config.rollout import SamplingConfig
from services.common.errors import InvalidInput, NotFound
from services.common.files import parse_object
from services.common.json_values import JsonObject
from services.common.model_card import vocab_size_of
from services.coordinator.compat import import_transformers
from services.coordinator.text.chat_template import ChatTemplate, Message, TemplateRefusal
from services.coordinator.text.plain_text import PlainText, encoding

if TYPE_CHECKING:
    from transformers import TokenizersBackend

# A tokenizer class without any of its files would begin with an empty vocabulary.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
# Follows the text to continue, which alone could also be a part of what the template writes after it.
_END_OF_BEGUN = "LockstepEndOfBegun "


class TooManyTokens(InvalidInput):
    """A prompt has more tokens than the model takes."""

    def __init__(self, most: int, num_tokens: str):
        # OpenAI's words, by which clients of agents tell a prompt that is too long from other bad requests.
        message = f"This model's maximum context length is {most} tokens, and the prompt alone has {num_tokens}"
        super().__init__(f"{message} (rollout.max_model_len)")


class Tokenizer:
    """Encodes and decodes text exactly like transformers' tokenizer of the same directory."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: ChatTemplate | None,
        eos_token_ids: tuple[int, ...],
        num_embeddings: int = sys.maxsize,
    ):
        self._backend = backend
        self._num_embeddings = num_embeddings  # of the model; a token may have been added and the model not enlarged
        self._template = template
        self._variables: Mapping[str, object] = {}
        self._most_tokens = sys.maxsize
        self.eos_token_ids = eos_token_ids
        """Ids that end a sample, ascending, from generation_config.json, config.json and the tokenizer."""

    @classmethod
    def load(
        cls, directory: Path, *, chat_template: Path | None = None, date: datetime.date | None = None
    ) -> "Tokenizer":
        """Reads `directory`, a model in the Hugging Face format. Code that comes with it is never run.

        Args:
            directory: Has config.json and the tokenizer's files: tokenizer.json, or others that transformers converts.
            chat_template: A Jinja file to use instead of the model's chat template.
            date: The date for templates that need today's date.

        Raises:
            NotFound: There is no tokenizer, or no file `chat_template`.
            InvalidInput: A file is damaged, two files disagree about an added token, there is no end token, or the
                model has no embedding for one.
        """
        config = _read_json(directory / "tokenizer_config.json")
        loaded = _load(directory)
        backend = loaded.backend_tokenizer
        # tokenizer.json may have either set from training, which would silently truncate or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        added = config.get("added_tokens_decoder")
        special_tokens: dict[str, str] = loaded.special_tokens_map
        eos_token = special_tokens.get("eos_token")
        _check_added_tokens(directory, backend, added if isinstance(added, dict) else {}, eos_token)
        num_embeddings = _read_num_embeddings(directory)
        eos_token_ids = _read_eos_token_ids(directory, backend, eos_token, num_embeddings)
        source = _template_source(loaded, chat_template)
        if source is None:
            return cls(backend, None, eos_token_ids, num_embeddings)
        try:
            template = ChatTemplate(source, special_tokens, date)
        except InvalidInput as error:
            named = (directory / name for name in ("chat_template.jinja", "tokenizer_config.json"))
            file = chat_template or next((file for file in named if file.is_file()), directory)
            raise InvalidInput(f"{file}: {error.message}", field="data.chat_template") from error
        return cls(backend, template, eos_token_ids, num_embeddings)

    def with_tools(self, tools: Sequence[Mapping[str, object]]) -> "Tokenizer":
        """Returns this tokenizer with a chat template that shows `tools`, their JSON schemas, in every prompt.

        Raises:
            InvalidInput: There are `tools` and the chat template does not show any.
        """
        if not tools:
            return self
        if "tools" not in self.template_variables:
            raise InvalidInput(
                "the chat template does not show tools (it has no variable `tools`), so the model would not know them: "
                "set data.chat_template to one that does",
                field="data.chat_template",
            )
        shown = copy(self)
        shown._variables = {"tools": list(tools)}
        return shown

    def with_limit(self, most_tokens: int) -> "Tokenizer":
        """Returns this tokenizer, which refuses to encode a text with marks that surely has more tokens."""
        limited = copy(self)
        limited._most_tokens = most_tokens
        return limited

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def template_source(self) -> str | None:
        return self._template.source if self._template else None

    @property
    def template_variables(self) -> frozenset[str]:
        return self._template.variables if self._template else frozenset()

    @property
    def template_digest(self) -> str:
        return hashlib.blake2b((self.template_source or "").encode(), digest_size=16).hexdigest()

    def has_token(self, text: str) -> bool:
        """Returns whether `text` is a token that the model has an embedding for."""
        token_id = self._backend.token_to_id(text)
        return token_id is not None and token_id < self._num_embeddings

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns the token ids of `text`; special tokens written in the text become their ids.

        By default no token is added, which is right for templated text because the template writes BOS itself.
        `add_special_tokens` also adds what the tokenizer's post-processor puts before a text, such as BOS for models
        that were pre-trained with it, unless the text begins with it already. What it puts after a text, such as EOS,
        is not added: the text is continued.

        Raises:
            InvalidInput: The vocabulary has no token for a part of `text`, and no unknown token; or the model has no
                embedding for a token of it.
        """
        try:
            with encoding():
                encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise self._cannot_encode(text, error) from error
        return self._require_embeddings(_to_continue(encoded) if add_special_tokens else encoded.ids)

    def as_text(self, text: str, only: Collection[str] | None = None) -> str:
        """Returns `text` with marks in place of the added tokens, or `only` some, that it spells; see plain_text.py."""
        return self._plain_text.mark(text, only)

    def encode_marked(self, text: str) -> list[int]:
        """Returns the token ids of a text with parts that `as_text` made: the marked special tokens stay text.

        Raises:
            InvalidInput: See `encode`.
            TooManyTokens: See `with_limit`.
        """
        if len(text) > self._most_tokens and (fewest := self._plain_text.fewest_tokens(text)) > self._most_tokens:
            raise TooManyTokens(self._most_tokens, f"{fewest} or more")
        try:
            tokens = self._plain_text.encode(text)
        except ValueError as error:
            raise self._cannot_encode(text, error) from error
        return self._require_embeddings(tokens)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Encodes each of `texts` like `encode`, on all cores."""
        try:
            with encoding():
                encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except ValueError:  # encoding one by one names the text
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return [self._require_embeddings(_to_continue(one) if add_special_tokens else one.ids) for one in encodings]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(tokens, skip_special_tokens=skip_special_tokens)

    def decode_batch(self, texts: Sequence[Sequence[int]]) -> list[str]:
        """Decodes the tokens of each text like `decode`, on all cores; other threads go on meanwhile."""
        return self._backend.decode_batch([np.asarray(tokens, np.uint32).tolist() for tokens in texts])

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Renders `messages` with the chat template, followed by the header of the assistant's turn.

        Raises:
            InvalidInput: The model has no chat template, or the template needs a date and there is none.
            TemplateRefusal: The template rejects these messages.
        """
        if self._template is None:
            message = "messages need a chat template and the model has none: set data.chat_template to a Jinja file"
            raise InvalidInput(message, field="data.chat_template")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, **{**variables, **self._variables}
        )

    def render_prompt(self, messages: Sequence[Message], **variables: Any) -> str:
        """Renders a prompt: `messages` with the header of the assistant's turn or, if the last one is the assistant's,
        up to the end of its text, which the model continues.

        Raises:
            InvalidInput: See `render`.
            TemplateRefusal: The template does not show the text to continue.
        """
        if messages[-1]["role"] != "assistant":
            return self.render(messages, **variables)
        begun = messages[-1]["content"].lstrip()
        marked = {**messages[-1], "content": messages[-1]["content"] + _END_OF_BEGUN}
        whole = self.render([*messages[:-1], marked], add_generation_prompt=False, **variables)
        text, mark, rest = whole.rpartition(_END_OF_BEGUN.rstrip())
        if not rest.startswith(" "):  # many templates remove white space at the end of a message
            text, begun = text.rstrip(), begun.rstrip()
        if not (mark and text.endswith(begun)):
            raise TemplateRefusal(f"the chat template changes the last message {begun[:80]!r}", field="messages")
        return text

    @cached_property
    def _plain_text(self) -> PlainText:
        return PlainText(self._backend)

    def _require_embeddings(self, tokens: list[int]) -> list[int]:
        if (most := max(tokens, default=0)) >= self._num_embeddings:
            raise InvalidInput(
                f"the tokenizer makes token {most} of {self._backend.id_to_token(most)!r}, for which the model has no "
                "embedding (vocab_size of its config.json)",
                field="data",
            )
        return tokens

    @staticmethod
    def _cannot_encode(text: str, error: Exception) -> InvalidInput:
        return InvalidInput(f"the model's tokenizer cannot encode {text[:80]!r}: {error}", field="data")


def _to_continue(encoding: tokenizers.Encoding) -> list[int]:
    """Returns the tokens of a text after the special tokens before it, which come once, without those after it."""
    own = [place for place, text in enumerate(encoding.sequence_ids) if text is not None]
    if not own:
        return encoding.ids
    before, tokens = encoding.ids[: own[0]], encoding.ids[own[0] : own[-1] + 1]
    return tokens if tokens[: len(before)] == before else before + tokens


def _load(directory: Path) -> "TokenizersBackend":
    vocabulary = next((directory / name for name in VOCABULARIES if (directory / name).is_file()), None)
    if vocabulary is None:
        raise NotFound(f"{directory} has no tokenizer: none of {', '.join(VOCABULARIES)}", field="model")
    for name in ("config.json", "special_tokens_map.json"):
        _read_json(directory / name)
    import_transformers()
    from huggingface_hub.errors import StrictDataclassError  # a value in config.json that a model's class refuses
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(directory),
            local_files_only=True,
            trust_remote_code=False,
            mistral_format=False,  # tekken.json by mistral_common, in place of tokenizer.json
        )
    except Exception as error:  # transformers and tokenizers raise no narrower class
        why = f"{type(error).__name__}: {error}"
        file = directory / "config.json" if isinstance(error, StrictDataclassError) else vocabulary
        raise InvalidInput(f"{file}: transformers cannot load the tokenizer: {why}", field="model") from error
    if not isinstance(getattr(loaded, "backend_tokenizer", None), tokenizers.Tokenizer):
        message = f"{directory}: {type(loaded).__name__} has no fast tokenizer; add a tokenizer.json"
        raise InvalidInput(message, field="model")
    return loaded


def _read_json(path: Path) -> JsonObject:
    return parse_object(path.read_bytes(), path) if path.is_file() else {}


def _check_added_tokens(
    directory: Path, backend: tokenizers.Tokenizer, added: Mapping[str, JsonValue], eos_token: str | None
) -> None:
    """Checks what transformers would silently give another id: an added token of the config, or a new end token."""
    contents = {token.get("content"): int(key) for key, token in added.items() if isinstance(token, dict)}
    if not all(isinstance(content, str) for content in contents):
        message = f"{directory}: tokenizer_config.json has an added token without the text `content`"
        raise InvalidInput(message, field="model")
    for content, token_id in contents.items():
        actual = backend.token_to_id(str(content))
        if actual != token_id:
            raise InvalidInput(
                f"{directory}: tokenizer_config.json gives {content!r} the id {token_id}, but it has {actual}",
                field="model",
            )
    path = directory / "tokenizer.json"
    if eos_token is None or eos_token in contents or not path.is_file():
        return
    if tokenizers.Tokenizer.from_file(str(path)).token_to_id(eos_token) is None:
        raise InvalidInput(f"{directory}: eos_token {eos_token!r} is not in tokenizer.json", field="model")


def _read_num_embeddings(directory: Path) -> int:
    """Returns how many tokens the model at `directory` has embeddings for; no limit if its config does not say."""
    try:
        return vocab_size_of((directory / "config.json").read_bytes())
    except (OSError, ValueError, TypeError, LookupError):
        return sys.maxsize


def _template_source(loaded: "TokenizersBackend", override: Path | None) -> str | None:
    if override is not None and not override.is_file():
        raise NotFound(f"chat template {override} does not exist", field="data.chat_template")
    try:
        source = override.read_text(encoding="utf-8-sig") if override else loaded.chat_template
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{override} is not UTF-8 text: {error}", field="data.chat_template") from error
    if isinstance(source, dict) and "default" not in source:
        message = f"the model has chat templates {sorted(source)} but no default: set data.chat_template"
        raise InvalidInput(message, field="data.chat_template")
    source = source["default"] if isinstance(source, dict) else source
    if source is not None and not isinstance(source, str):
        raise InvalidInput(f"chat_template of {loaded.name_or_path} is {source!r}, not a text", field="model")
    return source


def _read_eos_token_ids(
    directory: Path, backend: tokenizers.Tokenizer, eos_token: str | None, num_embeddings: int
) -> tuple[int, ...]:
    named: dict[str, JsonValue] = {
        "tokenizer_config.json": None if eos_token is None else backend.token_to_id(eos_token)
    }
    for name in ("generation_config.json", "config.json"):
        named[name] = _read_json(directory / name).get("eos_token_id")
    found: set[int] = set()
    for name, value in named.items():
        for one in [] if value is None else value if isinstance(value, list) else [value]:
            if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < num_embeddings:
                message = f"{directory / name}: end token {one!r} is outside the model's vocabulary of {num_embeddings}"
                raise InvalidInput(message, field="model")
            found.add(one)
    if not found:
        message = f"{directory}: no eos token in generation_config.json, config.json or tokenizer_config.json"
        raise InvalidInput(message, field="model")
    return tuple(sorted(found))


def token_ids(value: object) -> list[int]:
    """Returns the token ids that a file of a model gives as one number, a list or null."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]


def stop_tokens(tokenizer: Tokenizer, sampling: SamplingConfig) -> list[int]:
    own = () if sampling.ignore_eos else tokenizer.eos_token_ids
    return list(dict.fromkeys((*own, *sampling.stop_token_ids)))
