"""Loads a Hugging Face causal model, proves that it is computed exactly, and shards it over the ranks.

The proof compares packed sequences with what transformers computes of each alone, on a small copy of the model. No list
says which models are right: what differs is refused with the difference.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.common.families.supported import require_supported as require_config_supported
from services.common.model_card import whole_weights
from services.common.rpc.progress import PROGRESS
from services.trainer.checkpoint.model_files import load_config, require_finite, require_tensors
from services.trainer.checkpoint.ranks import gather_json, same_on_all_ranks
from services.trainer.compat.torch import GROUPED_ALIGN_BYTES
from services.trainer.compat.transformers import ignored_tensors, keeping_float32, take_layout
from services.trainer.fsdp.lora import add_adapters, sites_of
from services.trainer.fsdp.model import Layout, LogprobModel, ValueModel, WeightStream, local_shard
from services.trainer.proof import MOST_NATS, make_reference
from services.trainer.structure import class_of, make_model, structure_of

_COMPILED_TOKENS = 5120
# What routers add to their scores before they choose experts.
_CORRECTION_BIAS = "e_score_correction_bias"
# Settings of architectures that change logits after the output layer, also by vLLM's code for other model types.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def require_loadable(causal_lm: PreTrainedModel, model_path: str, *, has_head: bool) -> None:
    """Checks that the files have exactly the tensors of the model, which takes their names and shapes from now on.

    Without `has_head`, any output layer is accepted. The engine, which starts without weights, is sent the tensors of
    the model and no others.
    """
    directory = Path(model_path)
    stored = whole_weights(directory)
    take_layout(causal_lm, {name: tensor.shape for name, tensor in stored.items()})
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
        with keeping_float32(_CORRECTION_BIAS):
            answer: Any = class_of(load_config(model_path)).from_pretrained(
                model_path, output_loading_info=True, **safe, **kwargs
            )
    except (ValueError, TypeError, LookupError, AttributeError, OSError, SafetensorError) as error:
        raise InvalidInput(f"model: {model_path} cannot be loaded: {error!r}", field="model") from error
    loaded, loading = answer  # because of output_loading_info
    missing = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    if missing := sorted(missing if has_head else missing - {"lm_head.weight"}):
        raise InvalidInput(f"model: {model_path} has no tensor {', '.join(missing[:5])}", field="model")
    return loaded


def require_supported(hf_config: PretrainedConfig, causal_lm: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Checks the structure of the model, whose weights are on the meta device."""
    structure, text_config = structure_of(causal_lm), hf_config.get_text_config()
    if structure.scale == 1 and not structure.softcap:
        for name in _LOGIT_SETTINGS:
            if getattr(text_config, name, None) not in (None, 1):
                raise InvalidInput(
                    f"model: {name} in its config.json is ignored by transformers for model_type "
                    f"{hf_config.model_type}, and vLLM may apply it; remove it",
                    field="model",
                )
    of_convolutions = {id(module.weight) for module in causal_lm.modules() if isinstance(module, nn.Conv1d)}
    for name, parameter in causal_lm.named_parameters():
        is_experts = parameter.ndim == 3 and id(parameter) not in of_convolutions
        if is_experts and parameter.shape[-1] * compute_dtype.itemsize % GROUPED_ALIGN_BYTES:
            multiple = GROUPED_ALIGN_BYTES // compute_dtype.itemsize
            raise InvalidInput(
                f"model: {name} of shape {list(parameter.shape)} (moe_intermediate_size, hidden_size): the last size "
                f"must be a multiple of {multiple} in {compute_dtype}; it is not supported with strategy fsdp",
                field="model",
            )


def build(
    kind: type[LogprobModel | ValueModel],
    model_path: str,
    config: TrainerConfig,
    mesh: DeviceMesh,
    *,
    weight_dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> LogprobModel | ValueModel:
    """Loads `model_path` on rank 0 and shards it; forward and backward compute in `compute_dtype`."""
    has_head, seed = kind is not ValueModel, torch.initial_seed() % 2**31
    with same_on_all_ranks():
        empty = make_empty(model_path, compute_dtype=compute_dtype, weight_dtype=weight_dtype)
        require_loadable(empty, model_path, has_head=has_head)
        sites = sites_of(empty, config.lora)
        add_adapters(empty, config.lora, sites, seed=seed)
    proven = ""
    with same_on_all_ranks():
        if mesh.get_rank() == 0:  # which takes seconds
            proven = layout_of(load_config(model_path)).value
    layout = Layout(gather_json(proven, torch.device("cpu"))[0])
    model = kind(empty, layout)
    model.eval()  # the policy that is trained is the one that sampled: without dropout or a router's jitter
    if config.gradient_checkpointing:
        for layer in model.layers:
            _recompute(layer)
    _shard(model, config, mesh, compute_dtype)
    # to_empty would also leave the buffers with unspecified content.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    device = "cpu" if config.fsdp.cpu_offload else mesh.device_type
    model.to_empty(device=device)
    _set_buffers(model, buffers, device)
    full: dict[str, Any] = {}
    with same_on_all_ranks():
        if mesh.get_rank() == 0:
            with PROGRESS.stage("read the weights"):
                whole = kind(load_weights(model_path, has_head=has_head, dtype=weight_dtype), layout)
            # The sharded model has them, so the state that it gets must have them too.
            add_adapters(whole.causal_lm, config.lora, sites, seed=seed)
            full = whole.state_dict()
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # Only now, because torch takes a state of one device only. FSDP does not move buffers to the GPU for a forward.
    _set_buffers(model, dict(model.named_buffers()), mesh.device_type)
    with same_on_all_ranks():
        require_finite(((name, local_shard(parameter)) for name, parameter in empty.named_parameters()), model_path)
    return model


def _set_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor], device: str) -> None:
    for name, buffer in buffers.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, buffer.to(device))


def make_empty(model_path: str, *, compute_dtype: torch.dtype, weight_dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model on the meta device, with its buffers on the CPU; `layout_of` proves it.

    Raises:
        InvalidInput: The model is not supported, by its config or its structure.
    """
    hf_config = load_config(model_path)
    require_config_supported(hf_config.to_dict(), "fsdp", f"{model_path}/config.json")
    try:
        # Buffers are real: those that are in no file, such as rotary frequencies, are computed here.
        with init_empty_weights(include_buffers=False):
            empty = make_model(hf_config, dtype=weight_dtype)
    except Exception as error:  # nothing but the config is read, and a wrong size may raise anything
        raise InvalidInput(f"model: {model_path}/config.json: {error!r}", field="model") from error
    require_supported(hf_config, empty, compute_dtype)
    empty.tie_weights()
    _keep_correction_biases(empty)
    for module in empty.modules():
        if isinstance(module, nn.Embedding):
            # With it torch would leave out the gradient of the pad token, which prompts may contain as an end token.
            module.padding_idx = None
    return empty


def _keep_correction_biases(causal_lm: PreTrainedModel) -> None:
    """Makes the routers' correction biases float32 buffers, which FSDP and publications do not cast.

    Their differences are often smaller than a step of bfloat16: rounded, they would choose other experts.
    """
    for module in causal_lm.modules():
        if (bias := getattr(module, _CORRECTION_BIAS, None)) is not None:
            delattr(module, _CORRECTION_BIAS)  # in ERNIE's it is a parameter
            module.register_buffer(_CORRECTION_BIAS, torch.zeros(bias.shape))


def _recompute(layer: nn.Module) -> None:
    """Makes a layer recompute its activations in the backward.

    transformers' own checkpointing works only in training mode, in which it also applies dropout.
    """
    forward = layer.forward

    def recomputed(*args: Any, **kwargs: Any) -> object:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    layer.forward = recomputed


def _compiled(forward: Callable[..., object], fewest: int) -> Callable[..., object]:
    """Compiles a layer's forward for micro-batches of at least `fewest` tokens.

    Reason: Inductor divides sums over tokens among the GPU's processors, and compiles again, in the middle of a run and
    for ten seconds, where the tokens are too few for that. Seen with torch 2.11 for 1,024 columns on an H100, below
    5,120 and below 2,560 tokens.
    """
    compiled = torch.compile(forward, dynamic=True)

    @functools.wraps(forward)
    def call(*args: torch.Tensor, **kwargs: Any) -> object:
        hidden_BLD = args[0] if args else kwargs["hidden_states"]
        is_small = hidden_BLD.shape[:-1].numel() < fewest
        return (forward if is_small else compiled)(*args, **kwargs)

    return call


def _shard(model: LogprobModel | ValueModel, config: TrainerConfig, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    if config.fsdp.cpu_offload and mesh.device_type != "cpu":
        shard = functools.partial(shard, offload_policy=CPUOffloadPolicy())
    for layer in model.layers:
        if config.fsdp.torch_compile is True and mesh.device_type == "cuda":
            fewest = min(_COMPILED_TOKENS, config.max_tokens_per_microbatch // 2)
            layer.forward = _compiled(layer.forward, fewest)
        shard(layer, reshard_after_forward=config.fsdp.reshard_after_forward)
    # The backward begins with the weights that the forward used last, so keep them gathered.
    root = shard(model, reshard_after_forward=False)
    root.set_reshard_after_backward(config.fsdp.reshard_after_forward)


def reshard(model: nn.Module) -> None:
    """Frees the gathered weights, in place of which the model has its shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


_proven: dict[str, Layout] = {}


def layout_of(config: PretrainedConfig) -> Layout:
    """Returns the first layout in which the model's log-probabilities are those of transformers.

    Raises:
        InvalidInput: There is none.
    """
    key = config.to_json_string(use_diff=False)
    if key not in _proven:  # a trainer opens the same model for several roles, and again for each run
        with PROGRESS.stage("compare a small copy of the model with transformers"):
            _proven[key] = _prove(config)
    return _proven[key]


def _prove(config: PretrainedConfig) -> Layout:
    problems: list[str] = []
    for layout in Layout:
        try:
            difference = largest_difference(config, layout)
        except InvalidInput as error:
            problems.append(error.message)
        except Exception as error:  # noqa: BLE001 a family's code may fail in any way on what it was not written for
            problems.append(f"{error!r}")
        else:
            if difference <= MOST_NATS:  # which NaN is not
                return layout
            problems.append(f"log-probabilities differ by up to {difference:.2g} nats")
    raise InvalidInput(
        f"model: model_type {config.model_type} is not supported with strategy fsdp: compared with transformers on "
        f"single sequences, packed: {problems[0]}; in padded rows: {problems[1]}",
        field="model",
    )


@torch.no_grad()
def largest_difference(config: PretrainedConfig, layout: Layout) -> float:
    """Returns the largest difference of log-probabilities, in nats, from transformers on single sequences."""
    reference = make_reference(config)
    return reference.difference(LogprobModel(reference.model, layout)(reference.packed(), 1.0)[0])
