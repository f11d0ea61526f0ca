"""The shape of a model, from its config.json alone: its tensors, and which of them parallel sizes cut."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.common.errors import InvalidInput, NotFound


@dataclass(frozen=True)
class Family:
    """What config.json does not say. `expert_width` is its key for the width of an expert, if there are any."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    expert_width: str = ""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(expert_width="intermediate_size"),
    "qwen2": Family(has_qkv_bias=True),
    "qwen3": Family(has_qk_norm=True),
    "qwen3_moe": Family(has_qk_norm=True, expert_width="moe_intermediate_size"),
}


@dataclass(frozen=True)
class Tensor:
    """A weight of one layer. `split` is the dimension that tensor parallelism cuts, if any: 0 rows, 1 columns."""

    name: str
    shape: tuple[int, ...]
    split: Literal[0, 1] | None = None

    def size(self, ranks: int = 1) -> int:
        """Numbers of it that each of `ranks` ranks holds."""
        numbers = self.shape[0] * (self.shape[1] if len(self.shape) > 1 else 1)
        return numbers // ranks if self.split is not None else numbers


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with gated feed-forward layers, all of them dense or all of them experts.

    `intermediate_size` is 0 if the layers are experts, and `num_experts` 0 if they are dense.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    has_qkv_bias: bool = False
    has_qk_norm: bool = False

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    def layer_tensors(self) -> Iterator[Tensor]:
        """Weights of a layer without its experts, in the order of the checkpoint."""
        for name, rows in (("q", self.query_size), ("k", self.key_value_size), ("v", self.key_value_size)):
            yield Tensor(f"{name}_proj", (rows, self.hidden_size), 0)
            if self.has_qkv_bias:
                yield Tensor(f"{name}_bias", (rows,), 0)
        yield Tensor("o_proj", (self.hidden_size, self.query_size), 1)
        if self.has_qk_norm:
            yield from (Tensor("q_norm", (self.head_dim,)), Tensor("k_norm", (self.head_dim,)))
        if self.num_experts:
            yield Tensor("router", (self.num_experts, self.hidden_size))
        else:
            yield from _feed_forward(self.hidden_size, self.intermediate_size)

    def expert_tensors(self) -> Iterator[Tensor]:
        """Weights of one expert of one layer."""
        return _feed_forward(self.hidden_size, self.moe_intermediate_size)

    def tensor_sizes(self) -> Iterator[int]:
        """Numbers of each tensor of the whole model, in the order of the checkpoint."""
        yield self.embedding_parameters()
        for _ in range(self.num_layers):
            yield from (tensor.size() for tensor in self.layer_tensors())
            for _ in range(self.num_experts):
                yield from (tensor.size() for tensor in self.expert_tensors())
            yield from (self.hidden_size, self.hidden_size)
        yield self.hidden_size
        if not self.tie_word_embeddings:
            yield self.embedding_parameters()

    def layer_parameters(self, tp: int = 1) -> int:
        """Numbers of one layer without its experts, norms included, on each of `tp` ranks."""
        return 2 * self.hidden_size + sum(tensor.size(tp) for tensor in self.layer_tensors())

    def expert_parameters(self, etp: int = 1) -> int:
        """Numbers of one expert of one layer on each of `etp` ranks."""
        return sum(tensor.size(etp) for tensor in self.expert_tensors())

    def embedding_parameters(self, tp: int = 1) -> int:
        """Numbers of the embedding, and of an output layer of its own, on each of `tp` ranks."""
        return self.vocab_size * self.hidden_size // tp

    @property
    def num_parameters(self) -> int:
        """Numbers of the whole model."""
        return sum(self.tensor_sizes())


def read_architecture(model_path: str | Path) -> Architecture:
    """The architecture of a model directory in the Hugging Face format.

    Raises:
        NotFound: There is no config.json.
        InvalidInput: It is not JSON, lacks a key, or is of a family that is not known; names the known ones.
    """
    file = Path(model_path) / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return _architecture(content, file)
    except OSError as error:
        raise NotFound(f"model: {file} cannot be read: {error.strerror}", field="model") from error
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"model: {file} is not the config of a model: {error}", field="model") from error


def _architecture(content: Mapping[str, Any], file: Path) -> Architecture:
    model_type = content.get("model_type")
    if model_type not in FAMILIES:
        raise InvalidInput(
            f"model: {file} is of model_type {model_type!r}; known are {', '.join(FAMILIES)}", field="model"
        )
    if content.get("mlp_only_layers") or content.get("decoder_sparse_step", 1) != 1:
        raise InvalidInput(
            f"model: {file} mixes dense layers and experts (mlp_only_layers, decoder_sparse_step)", field="model"
        )
    family = FAMILIES[model_type]
    if family.expert_width:
        feed_forward = {
            # transformers 5 writes num_local_experts, the published Qwen3 models have num_experts.
            "num_experts": _size(content, "num_experts" if "num_experts" in content else "num_local_experts"),
            "num_experts_per_tok": _size(content, "num_experts_per_tok"),
            "moe_intermediate_size": _size(content, family.expert_width),
        }
    else:
        feed_forward = {"intermediate_size": _size(content, "intermediate_size")}
    heads, hidden_size = _size(content, "num_attention_heads"), _size(content, "hidden_size")
    return Architecture(
        model_type=model_type,
        num_layers=_size(content, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=_size(content, "num_key_value_heads", default=heads),
        head_dim=_size(content, "head_dim", default=hidden_size // heads),
        vocab_size=_size(content, "vocab_size"),
        max_position_embeddings=_size(content, "max_position_embeddings"),
        tie_word_embeddings=content.get("tie_word_embeddings") is True,
        has_qkv_bias=family.has_qkv_bias or content.get("attention_bias") is True,
        has_qk_norm=family.has_qk_norm,
        **feed_forward,
    )


def _size(content: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = content.get(key) or default
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {content.get(key)!r}, not a size")
    return value


def _feed_forward(hidden_size: int, width: int) -> Iterator[Tensor]:
    yield from (Tensor("gate_proj", (width, hidden_size), 0), Tensor("up_proj", (width, hidden_size), 0))
    yield Tensor("down_proj", (hidden_size, width), 1)
