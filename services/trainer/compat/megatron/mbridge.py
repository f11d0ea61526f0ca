"""Corrects mbridge, which builds Megatron models from transformers configs and converts their weights.

Reason: mbridge ends with 0.15.1, which reads the configs of transformers 4 and is wrong about some models; and what
converts one weight has a private name, while its whole export sends pickles between ranks. Seen with mbridge 0.15.1,
transformers 5.19.0 and Megatron-Core 0.16.1.

Shapes: a shard is what one of the ranks that share a parameter has of it.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from transformers import PretrainedConfig

from services.common.compat import require_version

require_version("mbridge")

_Base: Any = object  # of mbridge's classes, with which it is mixed, the annotations are wrong

_ROW_PARALLEL = ("linear_proj.weight", "linear_fc2.weight")
_LATENT_NORM = re.compile(r"\.(q|kv)_layernorm\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def _pre_softmax(hf: PretrainedConfig) -> dict[str, object]:
    # mbridge has one value for each type. Softmax over only the chosen experts is softmax over all, renormalized.
    return {"moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True)}


def _sigmoid_router(hf: PretrainedConfig) -> dict[str, object]:
    # mbridge leaves groups of experts out, and takes one shared expert for all of them.
    has_groups = hf.n_group > 1
    return {
        "moe_router_pre_softmax": False,
        "moe_router_num_groups": hf.n_group if has_groups else None,
        "moe_router_group_topk": hf.topk_group if has_groups else None,
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
    }


# By model_type, the fields of TransformerConfig that mbridge sets to other values than config.json says.
_CORRECTIONS: Mapping[str, Callable[[PretrainedConfig], dict[str, object]]] = {
    "deepseek_v3": lambda hf: {
        **_sigmoid_router(hf),
        "kv_channels": hf.qk_head_dim,
        "mtp_num_layers": None,
        "disable_bf16_reduced_precision_matmul": False,
    },
    "glm4_moe": lambda hf: {**_sigmoid_router(hf), "add_qkv_bias": hf.attention_bias},
    "mixtral": _pre_softmax,
    "qwen2_moe": lambda hf: {
        **_pre_softmax(hf),
        "add_qkv_bias": hf.qkv_bias,
        "moe_shared_expert_gate": True,  # mbridge maps its weight, but does not ask Megatron for it
    },
    "qwen3_moe": _pre_softmax,
}
# Those for all types: dropout is not applied, as with Lockstep's own maps; neither backend's dispatchers overlap; one
# process may have models of several types, and Megatron accepts only one choice of kernels in it.
_FOR_ALL: dict[str, object] = {
    "attention_backend": AttnBackend.auto,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "moe_shared_expert_overlap": False,
}


class ModelBridge(_Base):
    """What mbridge knows of one model: its config for Megatron, and its parameters under the names in a whole model.

    It is mixed into mbridge's class of a model_type, before it.
    """

    def __init__(
        self,
        hf: PretrainedConfig,
        make_config: Callable[..., TransformerConfig],
        rope: Mapping[str, object],
        dtype: torch.dtype,
    ):
        self.TransformerConfigClass, self._rope = make_config, rope
        super().__init__(_as_in_transformers_4(hf), dtype=dtype)

    def build(self, spec: TransformerBlockSubmodules, ends: tuple[bool, bool], stage: int | None) -> GPTModel:
        """Makes a chunk; `ends` say whether it has the embedding and the output layer, `stage` is its VPP rank."""
        self._spec = spec
        return self._model_provider([])(*ends, vp_stage=stage)

    def tensor_names(self, parameter: str) -> tuple[str, ...]:
        return tuple(self._weight_name_mapping_mcore_to_hf(self._fused(parameter)))

    def cut(self, parameter: str, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        name = self._fused(parameter)
        whole = self._weight_to_mcore_format(name, list(tensors))
        return self._weight_split_across_tp(name, whole, _cut_like(name, whole.shape, size), size)[rank]

    def join(self, parameter: str, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the checkpoint tensors, in the order of `tensor_names`."""
        name = self._fused(parameter)
        whole = self._weight_merge_across_tp(name, list(shards), _cut_like(name, shards[0].shape, 1))
        return self._weight_to_hf_format(name, whole)[1]

    def _fused(self, parameter: str) -> str:
        """Returns the name that TransformerEngine's layers give to a parameter; mbridge knows only those."""
        if "self_attention.linear_kv_up_proj.weight" in self._ATTENTION_MAPPING:
            name = _LATENT_NORM.sub(r".linear_\1_up_proj.layer_norm_", parameter)
        else:
            name = parameter.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        if not any(key.startswith("pre_mlp_layernorm") for key in self._MLP_MAPPING):  # the layers are dense
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        return _LOCAL_EXPERT.sub(r".\2.weight\1", name)

    # The rest are mbridge's own methods.

    def _adjust_mapping_for_shared_weights(self) -> None:
        # Qwen2's edits the mapping of its class, so that untied models made later in the process are tied, too; those
        # of other types do nothing, so that a tied model's last pipeline stage finds no tensor.
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = self._DIRECT_MAPPING["embedding.word_embeddings.weight"]

    def _build_base_config(self, **settings: object) -> TransformerConfig:
        correct = _CORRECTIONS.get(self.hf_config.model_type, lambda hf: {})
        settings.pop("max_position_embeddings", None)  # Megatron's config for latent attention has it no more
        return super()._build_base_config(**settings | correct(self.hf_config) | _FOR_ALL)

    def _get_gptmodel_args(self) -> dict[str, object]:
        # It looks for `rope_scaling`, which transformers 5 does not have, and takes every kind for the linear one.
        arguments = super()._get_gptmodel_args()
        arguments.pop("seq_len_interpolation_factor", None)
        return arguments | self._rope

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> object:
        self.has_vp_stage = True
        return self._spec

    def _weight_merge_across_tp(self, name: str, shards: list[torch.Tensor], like: Any) -> torch.Tensor:
        # It expects as many shards of an expert as TP has ranks if TP is 1, and otherwise as many as ETP has.
        own = self.mpu
        self.mpu = replace(own, tp_size=len(shards), etp_size=len(shards))
        try:
            return super()._weight_merge_across_tp(name, shards, like)
        finally:
            self.mpu = own


def make_bridge(
    hf: PretrainedConfig, make_config: Callable[..., TransformerConfig], rope: Mapping[str, object], dtype: torch.dtype
) -> ModelBridge:
    """Makes the bridge of a model for the current parallel state.

    `make_config` takes mbridge's settings as keywords. `rope` has GPTModel's arguments for scaled rotary frequencies.
    """
    base = registry()[hf.model_type]
    return type(base.__name__, (ModelBridge, base), {})(hf, make_config, rope, dtype)


def registry() -> Mapping[str, type]:
    """Returns mbridge's class of each model_type."""
    from mbridge.core.bridge import _MODEL_REGISTRY  # late: the version is checked first, which names the extra

    return _MODEL_REGISTRY


def _as_in_transformers_4(hf: PretrainedConfig) -> PretrainedConfig:
    """Returns a copy that also has the attributes of transformers 4 that mbridge reads."""
    hf = copy.deepcopy(hf)
    hf.rope_theta = hf.rope_parameters["rope_theta"]
    hf.partial_rotary_factor = hf.rope_parameters.get("partial_rotary_factor", 1.0)
    if getattr(hf, "head_dim", 0) is None:  # Mixtral's, which mbridge computes only if it is missing
        hf.head_dim = hf.hidden_size // hf.num_attention_heads
    return hf


def _cut_like(name: str, shape: Sequence[int], size: int) -> Any:
    """Returns what mbridge reads of one of `size` shards of a parameter of that shape."""
    dim = 1 if name.endswith(_ROW_PARALLEL) else 0
    own = [length // size if place == dim else length for place, length in enumerate(shape)]
    return SimpleNamespace(shape=torch.Size(own), tensor_model_parallel=True, partition_dim=dim)
