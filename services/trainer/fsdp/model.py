"""Wraps a Hugging Face causal model to return log-probabilities or values, and shards it over the ranks."""

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from services.common.config.trainer.section import TrainerConfig
from services.common.errors import InvalidInput
from services.trainer.checkpoint.model_files import tensor_files
from services.trainer.fsdp import attention
from services.trainer.fsdp.supported import require_supported
from services.trainer.updates.logprobs import linear_logprobs
from services.trainer.updates.packing import Pack


class _Model(nn.Module):
    """Wraps the model so that one sharded forward runs from tokens to outputs."""

    def __init__(self, causal_lm: PreTrainedModel):
        super().__init__()
        self.causal_lm = causal_lm

    def hidden(self, pack: Pack) -> torch.Tensor:
        """Returns the last hidden state [N, D] before each target."""
        hidden_TD = self.causal_lm.get_submodule("model")(
            input_ids=pack.tokens_T[None],
            position_ids=pack.positions_T[None],
            use_cache=False,
            cu_seqlens=pack.cu_seqlens_B1,
            max_seqlen=pack.max_seqlen,
        ).last_hidden_state[0]
        return hidden_TD[pack.predict_N]


class LogprobModel(_Model):
    """Returns log-probabilities and entropies."""

    def forward(self, pack: Pack, temperature: float) -> torch.Tensor:
        """Returns the log-probability of each target and the entropy there, float32 [2, N].

        The logits [tokens, vocabulary] are never whole in memory.
        """
        weight_VD = self.causal_lm.get_parameter("lm_head.weight")
        return linear_logprobs(self.hidden(pack), weight_VD, pack.targets_N, temperature)


class ValueModel(_Model):
    """Returns one number per target: the value of the state before it. It is 0 before any training."""

    def __init__(self, causal_lm: PreTrainedModel):
        super().__init__(causal_lm)
        weight = causal_lm.get_input_embeddings().get_parameter("weight")
        causal_lm.lm_head = nn.Identity()
        self.value_head = nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, pack: Pack, temperature: float) -> torch.Tensor:
        """Returns the values, float32 [1, N]."""
        # Always in float32: the bfloat16 number after 1 is about 1.01.
        return nn.functional.linear(self.value_head.weight.float(), self.hidden(pack).float())


def build(
    kind: type[_Model],
    model_path: str,
    config: TrainerConfig,
    mesh: DeviceMesh,
    *,
    weight_dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> _Model:
    """Loads `model_path` on rank 0 and shards it; forward and backward compute in `compute_dtype`.

    Raises:
        InvalidInput: transformers does not know the model's architecture, FSDP does not support it here, or there are
            no safetensors weights.
    """
    tensor_files(Path(model_path))
    try:
        hf_config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        kwargs: dict[str, Any] = {"dtype": weight_dtype, "attn_implementation": attention.NAME}
        with init_empty_weights(include_buffers=False):
            empty = AutoModelForCausalLM.from_config(hf_config, **kwargs)
    except (ValueError, OSError) as error:
        raise InvalidInput(f"model: {model_path}: {error}", field="model") from error
    require_supported(hf_config, empty)
    empty.tie_weights()
    if config.gradient_checkpointing:
        empty.gradient_checkpointing_enable({"use_reentrant": False})
    model = kind(empty)
    _shard(model, config, mesh, compute_dtype)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if config.fsdp.cpu_offload else mesh.device_type)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    _move_buffers(model, mesh.device_type)
    full: dict[str, Any] = {}
    if mesh.get_rank() == 0:
        disable_progress_bar()  # it would fill the service's log
        safe = {"use_safetensors": True, "trust_remote_code": False}
        loaded = AutoModelForCausalLM.from_pretrained(model_path, **safe, **kwargs)
        full = kind(loaded).state_dict()
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


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


def _move_buffers(model: nn.Module, device: str) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
