"""Defines the model families' chat templates as their documentation shows them, with small tokenizers of both kinds."""

import datetime
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from services.coordinator.text.bridge import Bridge
from services.coordinator.text.chat_template import ChatTemplate
from services.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.conftest import SPLIT

TEMPLATES = Path(__file__).parent / "templates"
_SPECIAL = (
    *("<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "<think>", "</think>"),
)
# The tokens of Phi-3, which take in the white space after them.
_SPECIAL_WITH_SPACE = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_PLAIN = " with plain [INST]"  # Mixtral has no special tokens for [INST]
_CORPUS = [
    "Natalia sold clips to 48 of her friends in April, and then half as many clips in May. assistant user system",
    'How many clips? {"name": "search", "arguments": {"query": "clips"}} What is 12 + 30 - 7 = ?',
    "Zoë said: 漢字 🎉 is fun.\n\nSo the result of the search is\n<tool_response>\n42\n</tool_response>\n",
]
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds documents.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    },
)


@cache
def _byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


@cache
def _sentencepiece() -> tokenizers.Tokenizer:
    """Returns a tokenizer like those of Mistral and Phi-3.

    Spaces are `▁`, one precedes each text, and unknown characters are bytes.
    """
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    trained.train_from_iterator(_CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(pair) for pair in model["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


@cache
def _backend(kind: str) -> tokenizers.Tokenizer:
    base = {"byte-level": _byte_level, "sentencepiece": _sentencepiece}[kind.removesuffix(_PLAIN)]()
    backend = tokenizers.Tokenizer.from_str(base.to_str())
    special = [text for text in _SPECIAL if not (kind.endswith(_PLAIN) and "INST]" in text)]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    backend.add_special_tokens([AddedToken(text, normalized=False, rstrip=True) for text in _SPECIAL_WITH_SPACE])
    return backend


def make_tokenizer(
    template: str | None, *, bos: str = "<s>", eos: tuple[str, ...] = ("</s>",), kind: str = "byte-level"
) -> Tokenizer:
    """Returns a small tokenizer with the chat template whose source is `template`, or with none."""
    backend = _backend(kind)
    special = {"bos_token": bos, "eos_token": eos[0]}
    compiled = None if template is None else ChatTemplate(template, special, datetime.date(2026, 11, 1))
    ids = [backend.token_to_id(text) for text in eos]
    return Tokenizer(backend, compiled, tuple(sorted(token for token in ids if token is not None)))


@dataclass(frozen=True, eq=False)
class Family:
    """Holds a template, and describes the conversations that it takes."""

    template: str
    eos: tuple[str, ...]
    roles: tuple[str, ...]
    """Roles of an environment's messages."""
    bos: str = "<s>"
    max_messages: int = 3
    """Messages of one reply."""
    said: Callable[[random.Random, str], str] = lambda chance, text: text
    """What the assistant says, made from any text that begins and ends with a word."""
    is_call: bool = False
    """Whether the assistant's turns are passed to the template as tool calls."""
    is_plain: bool = False
    """Whether the assistant header ends with plain text, after which the assistant's text has no space of its own."""
    kinds: tuple[str, ...] = ("byte-level",)
    tools: tuple[Mapping[str, Any], ...] = ()
    num_turns: int = 10_000
    """Turns to play with each kind of tokenizer: together, families with one template play 10,000 of them."""

    @cache  # noqa: B019 families live as long as the tests
    def tokenizer(self, kind: str = "byte-level") -> Tokenizer:
        source = (TEMPLATES / f"{self.template}.jinja").read_text(encoding="utf-8")
        return make_tokenizer(source, bos=self.bos, eos=self.eos, kind=kind)

    def bridge(self, kind: str = "byte-level") -> Bridge:
        return Bridge(self.tokenizer(kind), self.tools)


def _after_space(chance: random.Random, text: str) -> str:
    return " " + text


def _spaced(chance: random.Random, text: str) -> str:
    return text + chance.choice(["", " ", "\n", "\n\n "])


def _thinking(chance: random.Random, text: str) -> str:
    return chance.choice(["", f"<think>\n{text[::-1].strip()}\n</think>\n\n"]) + _spaced(chance, text)


def _begun_thinking(chance: random.Random, text: str) -> str:
    return f"Hm, {text}\n</think>\n\n" + _spaced(chance, text)


def _call(chance: random.Random, text: str) -> str:
    function = json.dumps({"name": "search", "arguments": {"query": text}}, ensure_ascii=False)
    return f'[TOOL_CALLS] [{function[:-1]}, "id": "{chance.randrange(10**9):09d}"}}]'


_CHATML, _BOTH = ("<|im_end|>", "<|endoftext|>"), ("byte-level", "sentencepiece")
_ANY = ("user", "tool", "system")
FAMILIES = {
    "llama-3.1": Family(*("llama-3.1", ("<|eot_id|>", "<|eom_id|>"), _ANY), bos="<|begin_of_text|>", tools=TOOLS),
    "mistral-v0.3": Family(
        *("mistral-v0.3", ("</s>",), ("user",)), max_messages=1, said=_after_space, kinds=_BOTH, num_turns=3000
    ),
    "mistral-v0.3-tools": Family(
        *("mistral-v0.3", ("</s>",), ("tool",)), said=_call, is_call=True, kinds=_BOTH, tools=TOOLS, num_turns=2000
    ),
    "mixtral": Family(
        *("mixtral", ("</s>",), ("user",)),
        max_messages=1,
        said=_after_space,
        is_plain=True,
        kinds=tuple(kind + _PLAIN for kind in _BOTH),
        num_turns=5000,
    ),
    "phi-3": Family(
        *("phi-3", ("<|endoftext|>", "<|end|>"), ("user", "system")), said=_spaced, kinds=_BOTH, num_turns=5000
    ),
    "qwen2": Family("qwen2", _CHATML, ("user", "system"), said=_spaced, num_turns=5000),
    "qwen2-moe": Family("qwen2", _CHATML, ("user",), said=_spaced, num_turns=5000),
    "qwen2.5": Family("qwen2.5", _CHATML, _ANY, said=_thinking, tools=TOOLS),
    "qwen3": Family("qwen3", _CHATML, ("tool",), said=_thinking, tools=TOOLS, num_turns=5000),
    "qwen3-moe": Family("qwen3", _CHATML, ("tool",), said=_thinking, num_turns=5000),
    "qwen3-moe-thinking": Family("qwen3-thinking", _CHATML, ("tool",), said=_begun_thinking, tools=TOOLS),
}
