"""Changes chunks, routers and dispatchers of experts where Megatron has no setting for it, and frees chunks at the end.

Seen with Megatron-Core 0.16.1, on GPU with TransformerEngine 2.12.0.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute, router_gating_linear, unpermute
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer

from services.trainer.compat.torch import set_class


class HiddenStateModel(GPTModel):
    """Returns hidden states on the last pipeline stage too.

    Reason: GPTModel itself computes whole logits there, or the loss of given labels.
    """

    # GPTModel calls it with keywords only.
    def _postprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        return hidden_states


# transformers' classes give the norms of latents this eps, and not that of config.json.
_LATENT_EPS = 1e-6


def set_latent_eps(chunk: torch.nn.Module) -> None:
    """Gives the norms of latent attention the eps that they have in transformers.

    Reason: Megatron has one setting for all norms.
    """
    for layer in chunk.modules():
        if isinstance(layer, MLASelfAttention):
            for name in ("q_layernorm", "kv_layernorm") if layer.config.q_lora_rank else ("kv_layernorm",):
                norm = getattr(layer, name)
                assert isinstance(norm.eps, float)
                norm.eps = _LATENT_EPS


class _BiasedRouter(TopKRouter):
    """Adds the bias of its logits (gpt-oss) to the product.

    Reason: Megatron hands the bias to TransformerEngine's GEMM, whose result is float32 where the bias is bfloat16, a
    pair that cuBLASLt does not list, and which Megatron's tests do not have.
    """

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        dtype = {None: input.dtype, "fp32": torch.float32, "fp64": torch.float64}[self.config.moe_router_dtype]
        assert self.bias is not None
        return router_gating_linear(input, self.weight, None, dtype) + self.bias.to(dtype)


def add_router_biases(chunk: torch.nn.Module) -> None:
    """Makes routers that have a bias of their logits add it after the product."""
    for module in chunk.modules():
        if type(module) is TopKRouter and module.bias is not None:
            set_class(module, _BiasedRouter)


def add_gradients_in_place(chunks: Iterable[torch.nn.Module]) -> None:
    """Makes TransformerEngine's GEMMs add gradients into the gradient buffer, without rounding or copying them first.

    Reason: Megatron's setting for it, gradient_accumulation_fusion, requires Apex for its output layer, which Lockstep
    does not use.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # pyright: ignore[reportArgumentType]  a plain attribute


def take_apart(chunks: Iterable[torch.nn.Module]) -> None:
    """Breaks the reference cycles of chunks, wrapped or not, to free their memory and groups. Do not use them then.

    Reason: the cycles go through C++ (DDP's gradient accumulators, the float32 weight that a parameter keeps), where
    Python's garbage collector does not see them, and a cache on each rotary embedding's class keeps instances alive.
    """
    RotaryEmbedding.forward.cache_clear()
    YarnRotaryEmbedding.forward.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]  its decorators hide the cache
    for chunk in chunks:
        getattr(chunk, "grad_accs", []).clear()
        for parameter in chunk.parameters():
            vars(parameter).pop("main_param", None)
        for module in list(chunk.modules()):
            vars(module).clear()


# Takes the experts that the router chooses, [rows, top_k]; returns those to compute with.
Choose = Callable[[torch.Tensor], torch.Tensor]


class _Replay:
    """Stands in for Megatron's RouterReplay, of which the router calls only this method.

    Reason: Megatron's own keeps all routers of a process in one global list, also those of other roles, and the caller
    must tell it when a layer is recomputed. A fused router does not call it.
    """

    def __init__(self, choose: Choose):
        self._choose = choose

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert default_compute_topk is not None, "Megatron's router gives it"
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = self._choose(own)
        return scores.gather(1, experts), experts


def set_choice(layer: TransformerLayer, choose: Choose) -> None:
    """Makes the router of a layer of experts compute with what `choose` returns."""
    assert isinstance(layer.mlp, MoELayer) and isinstance(layer.mlp.router, TopKRouter)
    layer.mlp.router.router_replay = _Replay(choose)  # pyright: ignore[reportAttributeAccessIssue]  it is duck-typed


# No token is gathered as sent to an expert whose probability is this.
_NOT_CHOSEN = -1.0


class OneRankDispatcher(MoEAlltoAllTokenDispatcher):
    """Sorts tokens by expert once, and keeps the counts on the device. Nothing is sent.

    Reason: Megatron's sends a copy of a token for each of its experts, sorts the tokens by expert a second time, and
    waits in every layer until the GPU has counted each expert's tokens, also where no rank sends any.
    """

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        return routing_map.sum(dim=0)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        return tokens_per_expert


class GatherDispatcher(MoEAlltoAllTokenDispatcher):
    """Gives every rank the tokens of all ranks, and sums the outputs of their experts.

    Reason: Megatron's all-gather dispatcher refuses sequences of variable length, and waits twice.

    All ranks must have the same number of tokens. Suffixes: T tokens of a rank, A of all ranks, E experts of a rank,
    X of all ranks, R rows that a rank computes, H hidden size.
    """

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens [T, H], and the probabilities [T, X] with _NOT_CHOSEN where no token is sent."""
        self.hidden_shape = hidden_states.shape
        return hidden_states.view(-1, self.hidden_shape[-1]), probs.masked_fill(~routing_map, _NOT_CHOSEN)

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens [A, H] and the probabilities [A, X] of all ranks."""
        tokens_AH = mappings.gather_from_sequence_parallel_region(permutated_local_input_tokens, group=self.ep_group)
        return tokens_AH, mappings.gather_from_sequence_parallel_region(permuted_probs, group=self.ep_group)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the rows of this rank's experts [R, H], sorted by expert, their number by expert, and their
        probabilities [R]. Waits until the device has counted them."""
        first = self.local_expert_indices[0]
        probs_AE = global_probs[:, first : first + self.num_local_experts].contiguous()
        self._map_AE = probs_AE > _NOT_CHOSEN
        self._gathered_shape = global_input_tokens.shape
        counts_E = self._map_AE.sum(0)
        rows_RH, probs_R, self._order = permute(
            global_input_tokens,
            self._map_AE,
            probs=probs_AE,
            num_out_tokens=int(counts_E.sum()),
            fused=self.config.moe_permute_fusion,
        )
        assert probs_R is not None, "permute returns the probabilities that it gets"
        return rows_RH, counts_E, probs_R

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the sum of each token's outputs on this rank [A, H]."""
        fused, shape = self.config.moe_permute_fusion, self._gathered_shape
        return unpermute(hidden_states, self._order, restore_shape=shape, routing_map=self._map_AE, fused=fused)

    def token_combine(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Returns the sums over all ranks of this rank's tokens [T, H]."""
        return mappings.reduce_scatter_to_sequence_parallel_region(hidden_states, group=self.ep_group)

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        return permutated_local_input_tokens.view(self.hidden_shape)


def use_faster_dispatchers(chunk: torch.nn.Module, *, gathers: bool) -> None:
    """Uses OneRankDispatcher in the layers whose experts are all on this rank, and which drop and pad no tokens; with
    `gathers`, all layers have experts on several ranks and use GatherDispatcher."""
    for layer in chunk.modules():
        dispatcher = layer.token_dispatcher if isinstance(layer, MoELayer) else None
        if type(dispatcher) is not MoEAlltoAllTokenDispatcher:
            continue
        if gathers:
            set_class(dispatcher, GatherDispatcher)
            continue
        config = dispatcher.config
        is_plain = config.moe_expert_capacity_factor is None and not config.moe_router_padding_for_quantization
        if dispatcher.ep_size == dispatcher.tp_size == 1 and is_plain:
            set_class(dispatcher, OneRankDispatcher)  # pyright: ignore[reportArgumentType]
            dispatcher.num_local_experts = 1  # with more it would sort them
