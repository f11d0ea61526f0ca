"""Wraps a Hugging Face causal model to return log-probabilities or values of packed sequences.

The layers of any such model mix packed tokens: attention by transformers' common interface, and rows for others.

Suffixes: T tokens of all sequences, B sequences, L tokens of the longest, H query heads, K key heads, D numbers of a
head or of a hidden state, N targets, V words of the vocabulary.
"""

import enum
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from services.common.errors import InvalidInput
from services.common.families.supported import choose
from services.trainer.attention import Attention, attend, to_rows, token_mask
from services.trainer.structure import structure_of
from services.trainer.updates.logprobs import linear_logprobs
from services.trainer.updates.packing import Microbatch

PACKED_ATTENTION = "lockstep_packed"
# What models hand to every attention, and what changes nothing here: there is no cache, no dropout in evaluation, and
# the sequences are known by their lengths.
_WITHOUT_EFFECT = frozenset(
    ("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "past_key_values")
)
_KNOWN = frozenset(("cu_seqlens", "max_seqlen", "scaling", "sliding_window", "s_aux", "softcap"))


def kernels_of(decoder: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Names the kernels that a model's layers will use."""
    names = dict[str, None]()
    for module in decoder.modules():
        head_size = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
        attends = hasattr(module, "o_proj") or hasattr(module, "k_proj")  # recurrent layers have a head_dim too
        if isinstance(head_size, int) and attends:
            has_cap = getattr(module, "attn_logit_softcapping", None) is not None
            names[choose(device.type, str(dtype), head_size, has_cap=has_cap)] = None
    return ", ".join(names)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends causally within each sequence. query [1, H, T, D]; key, value [1, K, T, D]; result [1, T, H, D].

    Raises:
        InvalidInput: The model asks for something that is not known here.
    """
    _require_known(attention_mask, kwargs)
    scale, lengths = kwargs.get("scaling"), (kwargs["cu_seqlens"], kwargs["max_seqlen"])
    attention = Attention(
        query.size(-1) ** -0.5 if scale is None else scale,
        kwargs.get("sliding_window"),
        kwargs.get("s_aux"),
        kwargs.get("softcap"),
    )
    query_THD, key_TKD, value_TKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return attend(query_THD, key_TKD, value_TKD, lengths, attention).unsqueeze(0), None


def _require_known(attention_mask: object, kwargs: Mapping[str, object]) -> None:
    unknown = {name for name, value in kwargs.items() if value is not None} - _KNOWN - _WITHOUT_EFFECT
    if attention_mask is not None:
        problem = "an attention mask"
    elif "cu_seqlens" not in kwargs:
        problem = "attention that is not told the lengths of packed sequences"
    elif unknown:
        problem = f"attention with {', '.join(sorted(unknown))}"
    else:
        return
    raise InvalidInput(f"model: {problem} is not supported with strategy fsdp", field="model")


class Rows:
    """Lets single modules of a model compute padded rows while all others compute packed tokens.

    A module with a convolution or a recurrent state would carry it from one packed sequence into the next. It gets its
    input as rows instead, B sequences of up to L tokens, padded on the right: what is causal never looks there, so the
    padding needs no mask and changes nothing.
    """

    is_token_BL: torch.Tensor
    """Where the sequences of the forward passes that follow, and of their backward passes, have tokens."""

    def scatter(self, packed_TX: torch.Tensor) -> torch.Tensor:
        """Returns the rows [B, L, ...] of packed values [T, ...]."""
        return to_rows(packed_TX, self.is_token_BL)

    def gather(self, rows_BLX: torch.Tensor) -> torch.Tensor:
        """Returns the packed values [T, ...] of rows [B, L, ...]."""
        return rows_BLX[self.is_token_BL]

    def add_to(self, decoder: nn.Module) -> None:
        """Makes every module that owns a convolution over tokens compute rows.

        In transformers' models, whatever keeps a state from token to token begins with such a convolution.
        """
        for module in list(decoder.modules()):
            if any(isinstance(child, nn.Conv1d) for child in module.children()):
                self._compute_rows(module)

    def _compute_rows(self, module: nn.Module) -> None:
        forward = module.forward

        def of_rows(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
            # Masks, positions and caches do not apply to the rows, and none is needed.
            result = forward(self.scatter(hidden_states[0]))
            if isinstance(result, tuple):
                return self.gather(result[0])[None], *result[1:]
            return self.gather(result)[None]

        module.forward = of_rows


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


class Layout(enum.Enum):
    """How a micro-batch is laid out where tokens are mixed; all other modules of the model compute packed tokens."""

    PACKED = "packed"
    ROWS = "rows"
    """The whole model computes padded rows."""


class _Model(nn.Module):
    """Wraps the model so that one sharded forward runs from tokens to outputs."""

    def __init__(self, causal_lm: PreTrainedModel, layout: Layout):
        super().__init__()
        self.causal_lm, self.layout, self.structure = causal_lm, layout, structure_of(causal_lm)
        self._rows = Rows()
        trained = {id(one) for part in (self.decoder, self.head) for one in part.parameters()}
        for parameter in causal_lm.parameters():
            if id(parameter) not in trained:  # of a vision tower, which no text reaches
                parameter.requires_grad_(False)
        if layout is Layout.PACKED:
            causal_lm.set_attn_implementation(PACKED_ATTENTION)
            self._rows.add_to(self.decoder)
        else:
            causal_lm.set_attn_implementation("eager")

    @property
    def decoder(self) -> nn.Module:
        return self.causal_lm.get_submodule(self.structure.decoder)

    @property
    def head(self) -> nn.Module:
        return self.causal_lm.get_submodule(self.structure.head)

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.causal_lm.get_submodule(self.structure.layers).children())

    def attention(self, device: torch.device, dtype: torch.dtype) -> str:
        """Names what computes attention on a device, in the compute dtype."""
        if self.layout is Layout.ROWS:
            return "transformers' own operators, over padded samples"
        return kernels_of(self.decoder, device, dtype)

    def hidden(self, microbatch: Microbatch) -> torch.Tensor:
        """Returns the last hidden state [N, D] before each target."""
        self._rows.is_token_BL = token_mask(microbatch.cu_seqlens_B1, microbatch.max_seqlen)
        if self.layout is Layout.ROWS:
            rows = self.decoder(input_ids=self._rows.scatter(microbatch.tokens_T), use_cache=False)
            return self._rows.gather(rows.last_hidden_state)[microbatch.predict_N]
        hidden_TD = self.decoder(
            input_ids=microbatch.tokens_T[None],
            position_ids=microbatch.positions_T[None],
            use_cache=False,
            cu_seqlens=microbatch.cu_seqlens_B1,
            max_seqlen=microbatch.max_seqlen,
        ).last_hidden_state[0]
        return hidden_TD[microbatch.predict_N]


class LogprobModel(_Model):
    """Returns log-probabilities and entropies."""

    def forward(self, microbatch: Microbatch, temperature: float) -> torch.Tensor:
        """Returns float32 [R, N]: the log-probability of each target, the entropy there, and what else is asked for.

        The logits [tokens, vocabulary] are never whole in memory.
        """
        weight_VD = self.head.get_parameter("weight")
        hidden, scale, softcap = self.hidden(microbatch), self.structure.scale, self.structure.softcap
        # Logits scaled by s, over T, are plain ones over T / s, and a cap of c on them is one of c / s on plain ones.
        return linear_logprobs(hidden, weight_VD, microbatch.targets, temperature / scale, None, softcap / scale)


class ValueModel(_Model):
    """Returns one number per target: the value of the state before it. It is 0 before any training."""

    def __init__(self, causal_lm: PreTrainedModel, layout: Layout):
        super().__init__(causal_lm, layout)
        weight = causal_lm.get_input_embeddings().get_parameter("weight")
        causal_lm.set_submodule(self.structure.head, nn.Identity())
        self.value_head = nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, microbatch: Microbatch, temperature: float) -> torch.Tensor:
        """Returns the values, float32 [1, N], computed so too: the bfloat16 number after 1 is about 1.01."""
        # The weight is the input here, so that the result is [1, N] and not [N, 1].
        return nn.functional.linear(self.value_head.weight.float(), self.hidden(microbatch).float())
