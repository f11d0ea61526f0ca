"""Wraps a Hugging Face causal model to return log-probabilities or values of packed sequences.

The layers of any such model mix packed tokens: attention by transformers' common interface, and rows for others.

Suffixes: T tokens of all sequences, B sequences, L tokens of the longest, H query heads, K key heads, D numbers of a
head or of a hidden state, N targets, V words of the vocabulary.

`WeightStream` gathers the whole weights from FSDP's shards, with the names and shapes of the checkpoint.
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from services.common.compat.torch import Copies
from services.common.errors import InvalidInput
from services.common.families.supported import choose
from services.common.weights.plan import split_into_runs
from services.trainer.adapters import is_adapter
from services.trainer.attention import Attention, attend, to_rows, token_mask
from services.trainer.compat.torch import is_persistent
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


# One collective gathers parameters of about this many entries in total.
_RUN_NUMEL = 32 << 20


class WeightStream:
    """Iterates over the policy's tensors under checkpoint names, always in the same order, in `dtype`.

    Adapters are left out. It gathers some tens of MB at a time. Buffers that checkpoints contain, such as a router's
    correction, come last and keep their dtype.
    """

    def __init__(self, causal_lm: PreTrainedModel, dtype: torch.dtype, device: torch.device):
        self._causal_lm, self._dtype, self._device = causal_lm, dtype, device
        named = [(name, parameter) for name, parameter in causal_lm.named_parameters() if not is_adapter(name)]
        self._runs = list(split_into_runs(named, _fits_in_run))
        # Each buffer's name in the checkpoint, its module, and its name in the module.
        self._owners = [
            (f"{path}.{name}", module, name)
            for path, module in causal_lm.named_modules()
            for name, _ in module.named_buffers(recurse=False)
            if is_persistent(module, name)
        ]
        specs = ((name, self.meta(parameter)) for name, parameter in named)
        self._specs = {name: self._as_checkpoint(name, spec) for name, spec in (*specs, *self._buffers())}

    def specs(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.to("meta")) for specs in self._specs.values() for name, tensor in specs]

    def checkpoint_name(self, parameter: str) -> str | None:
        """Returns the checkpoint's name of a whole parameter; None if checkpoints have it in other tensors."""
        specs, shape = self._specs[parameter], self._causal_lm.get_parameter(parameter).shape
        return specs[0][0] if [spec.shape for _, spec in specs] == [shape] else None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for run in self._runs:
            for (name, _), whole in zip(run, self.gather([parameter for _, parameter in run]), strict=True):
                is_changed = [(stored, spec.shape) for stored, spec in self._specs[name]] != [(name, whole.shape)]
                yield from self._as_checkpoint(name, whole) if is_changed else [(name, whole)]
        for name, buffer in self._buffers():
            yield from self._as_checkpoint(name, buffer)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, owner, attribute in self._owners:
            yield name, getattr(owner, attribute)

    def gather(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Returns whole parameters. All ranks call it together."""
        local, world = [local_shard(parameter) for parameter in parameters], dist.get_world_size()
        if world == 1 and all(tensor.device == self._device and tensor.dtype == self._dtype for tensor in local):
            return local
        # Cast before gathering, which halves the bytes.
        numel = [[_shard_shape(p.shape, rank, world).numel() for p in parameters] for rank in range(world)]
        own = torch.empty(sum(numel[0]), dtype=self._dtype, device=self._device)  # rank 0 has the largest shard
        places = own[: sum(numel[dist.get_rank()])].split(numel[dist.get_rank()])
        targets = [place.view(tensor.shape) for place, tensor in zip(places, local, strict=True)]
        Copies(targets, local).run()  # a copy for each would cost more time than its bytes
        if world == 1:
            return targets
        gathered = torch.empty(world, own.numel(), dtype=self._dtype, device=self._device)
        dist.all_gather_into_tensor(gathered.view(-1), own)
        shards = [gathered[rank, : sum(numel[rank])].split(numel[rank]) for rank in range(world)]
        wholes = [torch.cat(of_ranks) for of_ranks in zip(*shards, strict=True)]
        return [whole.view(parameter.shape) for whole, parameter in zip(wholes, parameters, strict=True)]

    def _as_checkpoint(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Splits weights that transformers fuses in memory, such as experts, by transformers' own rule."""
        return list(revert_weight_conversion(self._causal_lm, {name: tensor}).items())

    def meta(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns a whole parameter's shape and its dtype in the stream as a meta tensor."""
        return torch.empty(parameter.shape, dtype=self._dtype, device="meta")


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a parameter or of its optimizer state, without gradient."""
    # to_local first: each operation on the DTensor itself costs tens of microseconds.
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _shard_shape(shape: torch.Size, rank: int, world: int) -> torch.Size:
    """Returns the shape of a rank's shard. Rows are cut as by torch.chunk: equal parts, the last shorter or empty."""
    most = -(-shape[0] // world)
    return torch.Size([max(0, min(most, shape[0] - rank * most)), *shape[1:]])


def _fits_in_run(run: list[tuple[str, nn.Parameter]], named: tuple[str, nn.Parameter]) -> bool:
    return sum(parameter.numel() for _, parameter in (*run, named)) <= _RUN_NUMEL
