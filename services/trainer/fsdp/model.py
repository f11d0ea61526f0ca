"""Wraps a Hugging Face causal model to return log-probabilities or values of packed sequences."""

import enum

import torch
from torch import nn
from transformers import PreTrainedModel

from services.trainer.fsdp import attention
from services.trainer.fsdp.attention import Rows
from services.trainer.structure import structure_of
from services.trainer.updates.logprobs import linear_logprobs
from services.trainer.updates.packing import Microbatch


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
            causal_lm.set_attn_implementation(attention.NAME)
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
        return attention.chosen(self.decoder, device, dtype)

    def hidden(self, microbatch: Microbatch) -> torch.Tensor:
        """Returns the last hidden state [N, D] before each target."""
        self._rows.begin(microbatch.cu_seqlens_B1, microbatch.max_seqlen)
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
        return nn.functional.linear(self.value_head.weight.float(), self.hidden(microbatch).float())
