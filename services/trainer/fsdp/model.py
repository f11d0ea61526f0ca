"""Wraps a Hugging Face causal model to return log-probabilities or values, and shards it over the ranks."""

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.common.families.architecture import require_supported as require_config_supported
from services.trainer.checkpoint.agreement import same_on_all_ranks
from services.trainer.checkpoint.model_files import (
    load_config,
    require_finite,
    require_tensors,
    stored_tensors,
)
from services.trainer.compat.torch import GROUPED_ALIGN_BYTES
from services.trainer.compat.transformers import ignored_tensors
from services.trainer.fsdp import attention
from services.trainer.fsdp.lora import add_adapters
from services.trainer.fsdp.weights import WeightStream, local_shard
from services.trainer.updates.logprobs import linear_logprobs
from services.trainer.updates.packing import Microbatch


def require_loadable(causal_lm: PreTrainedModel, model_path: str, *, has_head: bool) -> None:
    """Checks that the files have exactly the tensors of the model. Without `has_head`, any output layer is accepted.

    The engine, which starts without weights, is sent the tensors of the model and no others.
    """
    directory = Path(model_path)
    stored = stored_tensors(directory)
    specs = WeightStream(causal_lm, torch.float32, torch.device("cpu")).specs()
    shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in specs}
    tied = causal_lm.all_tied_weights_keys
    if not has_head:
        shapes.pop("lm_head.weight", None)
    for copy, original in tied.items():
        if copy in stored and original not in stored:
            shapes[copy] = shapes.pop(original, stored[copy].shape)  # transformers takes either
    require_tensors(stored, shapes, tied, directory, has_head=has_head, ignored=ignored_tensors(causal_lm))


def load_weights(model_path: str, *, has_head: bool, **kwargs: object) -> PreTrainedModel:
    """Loads a model whose files `require_loadable` has checked."""
    disable_progress_bar()  # it would fill the service's log
    safe = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
    try:
        answer: Any = AutoModelForCausalLM.from_pretrained(model_path, output_loading_info=True, **safe, **kwargs)
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise InvalidInput(f"model: {model_path} cannot be loaded: {error!r}", field="model") from error
    loaded, loading = answer  # because of output_loading_info
    missing = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    if missing := sorted(missing if has_head else missing - {"lm_head.weight"}):
        raise InvalidInput(f"model: {model_path} has no tensor {', '.join(missing[:5])}", field="model")
    return loaded


def require_supported(hf_config: PretrainedConfig, causal_lm: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Checks the model, whose weights are on the meta device and whose config is supported.

    Its logits must depend only on the output layer's weight, and no layer may mix the sequences of a micro-batch.
    """
    output_layer = getattr(causal_lm, "lm_head", None)
    if output_layer is None:
        raise _refusal("an output layer that is not lm_head")
    if output_layer.bias is not None:
        raise _refusal("lm_head.bias")
    modules = (hf_config, *causal_lm.modules())
    if any(getattr(module, "sliding_window", None) for module in modules):  # 0 means none, as in Qwen2-MoE
        raise InvalidInput("model: sliding_window in its config.json is not supported by any strategy", field="model")
    if any(isinstance(module, nn.Conv1d) for module in modules):
        raise _refusal("convolutions over tokens")
    if not isinstance(getattr(getattr(causal_lm, "model", None), "layers", None), nn.ModuleList):
        raise _refusal(f"model_type {hf_config.model_type}, whose layers are not model.layers,")
    _require_aligned_experts(causal_lm, compute_dtype)
    _require_packed_attention(causal_lm, hf_config.model_type)


def _require_aligned_experts(causal_lm: PreTrainedModel, dtype: torch.dtype) -> None:
    for name, parameter in causal_lm.named_parameters():
        if parameter.ndim == 3 and parameter.shape[-1] * dtype.itemsize % GROUPED_ALIGN_BYTES:
            multiple = GROUPED_ALIGN_BYTES // dtype.itemsize
            raise _refusal(
                f"{name} of shape {list(parameter.shape)} (moe_intermediate_size, hidden_size): the last size must be "
                f"a multiple of {multiple} in {dtype}; it"
            )


def _require_packed_attention(causal_lm: PreTrainedModel, model_type: str) -> None:
    """Runs the model on the meta device up to its first attention layer."""
    causal_lm.set_attn_implementation(attention.PROBE)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    lengths = torch.zeros(2, dtype=torch.int32, device="meta")
    packed = {"position_ids": tokens, "use_cache": False, "cu_seqlens": lengths, "max_seqlen": 2}
    try:
        causal_lm.get_submodule("model")(input_ids=tokens, **packed)
    except attention.ProbeReached as reached:
        if reached.problem:
            raise _refusal(f"model_type {model_type}, with {reached.problem},") from reached
    except NotImplementedError:
        pass  # a layer before the attention needs values, which meta tensors do not have; packed_attention checks again
    except Exception as error:  # nothing is computed, and sizes that do not fit may raise anything
        raise _refusal(f"model_type {model_type} ({error!r})") from error
    else:
        raise _refusal(f"model_type {model_type}, which does not use transformers' attention interface,")
    finally:
        causal_lm.set_attn_implementation(attention.NAME)


def _refusal(what: str) -> InvalidInput:
    return InvalidInput(f"model: {what} is not supported with strategy fsdp", field="model")


class _Model(nn.Module):
    """Wraps the model so that one sharded forward runs from tokens to outputs."""

    def __init__(self, causal_lm: PreTrainedModel):
        super().__init__()
        self.causal_lm = causal_lm

    def hidden(self, microbatch: Microbatch) -> torch.Tensor:
        """Returns the last hidden state [N, D] before each target."""
        hidden_TD = self.causal_lm.get_submodule("model")(
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
        """Returns the log-probability of each target and the entropy there, float32 [2, N], over the sampling masks.

        The logits [tokens, vocabulary] are never whole in memory.
        """
        weight_VD = self.causal_lm.get_parameter("lm_head.weight")
        return linear_logprobs(
            self.hidden(microbatch), weight_VD, microbatch.targets_N, temperature, mask_MK=microbatch.sampling_mask_NK
        )


class ValueModel(_Model):
    """Returns one number per target: the value of the state before it. It is 0 before any training."""

    def __init__(self, causal_lm: PreTrainedModel):
        super().__init__(causal_lm)
        weight = causal_lm.get_input_embeddings().get_parameter("weight")
        causal_lm.lm_head = nn.Identity()
        self.value_head = nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, microbatch: Microbatch, temperature: float) -> torch.Tensor:
        """Returns the values, float32 [1, N], computed so too: the bfloat16 number after 1 is about 1.01."""
        return nn.functional.linear(self.value_head.weight.float(), self.hidden(microbatch).float())


def build(
    kind: type[_Model],
    model_path: str,
    config: TrainerConfig,
    mesh: DeviceMesh,
    *,
    weight_dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> _Model:
    """Loads `model_path` on rank 0 and shards it; forward and backward compute in `compute_dtype`."""
    kwargs: dict[str, object] = {"dtype": weight_dtype, "attn_implementation": attention.NAME}
    has_head, seed = kind is not ValueModel, torch.initial_seed() % 2**31
    with same_on_all_ranks():
        empty = _empty(model_path, compute_dtype, kwargs)
        require_loadable(empty, model_path, has_head=has_head)
        add_adapters(empty, config.lora, seed=seed)
    model = kind(empty)
    model.eval()  # the policy that is trained is the one that sampled: without dropout or a router's jitter
    if config.gradient_checkpointing:
        for layer in empty.get_submodule("model.layers").children():
            _recompute(layer)
    _shard(model, config, mesh, compute_dtype)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if config.fsdp.cpu_offload else mesh.device_type)
    for name, buffer in buffers.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, buffer.to(mesh.device_type))
    full: dict[str, Any] = {}
    with same_on_all_ranks():
        if mesh.get_rank() == 0:
            whole = kind(load_weights(model_path, has_head=has_head, **kwargs))
            add_adapters(whole.causal_lm, config.lora, seed=seed)
            full = whole.state_dict()
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    with same_on_all_ranks():
        require_finite(((name, local_shard(parameter)) for name, parameter in empty.named_parameters()), model_path)
    return model


def _empty(model_path: str, compute_dtype: torch.dtype, kwargs: dict[str, object]) -> PreTrainedModel:
    """Returns the model on the meta device, with its buffers on the CPU."""
    hf_config = load_config(model_path)
    require_config_supported(hf_config.to_dict(), "fsdp", f"{model_path}/config.json")
    try:
        with init_empty_weights(include_buffers=False):
            empty = AutoModelForCausalLM.from_config(hf_config, **kwargs)
    except Exception as error:  # nothing but the config is read, and a wrong size may raise anything
        raise InvalidInput(f"model: {model_path}/config.json: {error!r}", field="model") from error
    require_supported(hf_config, empty, compute_dtype)
    empty.tie_weights()
    for module in empty.modules():
        if isinstance(module, nn.Embedding):
            # With it torch would leave out the gradient of the pad token, which prompts may contain as an end token.
            module.padding_idx = None
    return empty


def _recompute(layer: nn.Module) -> None:
    """Makes a layer recompute its activations in the backward.

    transformers' own checkpointing works only in training mode, in which it also applies dropout.
    """
    forward = layer.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    layer.forward = recomputed


def _shard(model: _Model, config: TrainerConfig, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "reshard_after_forward": config.fsdp.reshard_after_forward,
    }
    if config.fsdp.cpu_offload and mesh.device_type != "cpu":
        settings["offload_policy"] = CPUOffloadPolicy()
    for layer in model.causal_lm.get_submodule("model.layers").children():
        if config.fsdp.torch_compile and mesh.device_type == "cuda":
            layer.forward = torch.compile(layer.forward, dynamic=True)
        fully_shard(layer, **settings)
    # The backward begins with the weights that the forward used last, so keep them gathered.
    settings["reshard_after_forward"] = False
    fully_shard(model, **settings)


def reshard(model: nn.Module) -> None:
    """Frees the gathered weights after a forward that no backward follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
