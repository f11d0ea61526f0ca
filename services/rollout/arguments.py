"""The arguments of a vLLM engine, and checks that this host can run it."""

import socket
from dataclasses import dataclass
from typing import get_args

import torch
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs

from services.common.config.operation import SHARED_UTILIZATION
from services.common.config.rollout import Eagle3SpeculationConfig, RolloutConfig, SuffixSpeculationConfig
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.families.architecture import read_content
from services.common.families.registry import FAMILIES
from services.common.process import require_suffix_decoding
from services.common.routed_experts import RoutedExpertsShape
from services.rollout.compat.client import device_capability, forks_engines
from services.rollout.compat.recorded import EngineArguments
from services.rollout.compat.scheduler import scheduler
from services.rollout.receiver import WeightReceiver

# Of the oldest GPU with float8 matrix products (Ada).
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Needs:
    """The abilities that a run needs of the engine."""

    adapter_rank: int = 0
    """LoRA rank of adapters that are published beside a base; 0 if whole weights are published."""
    can_sleep: bool = False
    """Whether the engine must be able to free its memory."""
    routed_experts: RoutedExpertsShape | None = None
    """The shape of the routed experts to return with samples, if the engine can; None if the model has none."""


def engine_arguments(config: RolloutConfig, model_path: str, seed: int, needs: Needs = Needs()) -> EngineArguments:
    """Returns the vLLM engine arguments; `config.engine` overrides all others."""
    arguments: EngineArguments = {
        "model": model_path,
        "load_format": "dummy",  # the first publication fills in the weights
        "skip_tokenizer_init": True,
        "language_model_only": True,  # leaves out the towers of models that also see or hear: samples are text
        "dtype": config.dtype if config.dtype != "auto" else "bfloat16",
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_samples,
        "tensor_parallel_size": config.tensor_parallel_size,
        "seed": seed,
        # Log-probabilities of the distribution that is sampled from, temperature included. The trainer compares its own
        # with these.
        "logprobs_mode": "processed_logprobs",
        # Not the model's generation_config.json: each request says how it is sampled.
        "generation_config": "vllm",
        "worker_extension_cls": f"{WeightReceiver.__module__}.{WeightReceiver.__qualname__}",
        "scheduler_cls": f"{scheduler.__module__}.{scheduler.__qualname__}",
        "disable_log_stats": True,
    }
    if torch.cuda.is_available():
        # vLLM's default for LLM, with which whole batches of prompts start in few steps. AsyncLLM's is for low latency.
        arguments["max_num_batched_tokens"] = max(16384, config.max_samples)
        if config.torch_compile is False:
            arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        if forks_engines() and config.engine.get("data_parallel_size", 1) == 1 and not config.speculation:
            # The scheduler and the model runner get a CPU core each: with a small model, these limit an engine. What
            # drafts is timed in the scheduler's process.
            arguments["distributed_executor_backend"] = "mp"
        if needs.can_sleep:
            # vLLM takes this share of the GPU. The rest is for what stays of the trainer, such as its CUDA context.
            arguments |= {"enable_sleep_mode": True, "gpu_memory_utilization": SHARED_UTILIZATION}
    else:
        arguments |= _on_cpu(config)
    arguments |= _quantization(config)
    if config.speculation:
        num_rows = config.max_samples * (1 + config.speculation.num_tokens)
        arguments |= {
            "speculative_config": config.speculation.for_vllm(),
            "max_num_batched_tokens": max(num_rows, arguments["max_num_batched_tokens"]),
        }
    if needs.adapter_rank:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": next(rank for rank in get_args(MaxLoRARanks) if rank >= needs.adapter_rank),
            "max_loras": 1,
        }
        if read_content(model_path).get("model_type") in FAMILIES:  # of others, all that vLLM can adapt
            arguments["lora_target_modules"] = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    return arguments | config.engine


def _on_cpu(config: RolloutConfig) -> EngineArguments:
    return {
        "dtype": config.dtype if config.dtype != "auto" else "float32",
        "enforce_eager": True,
        # On a host with AMX, vLLM would compute latent attention with kernels that refuse float32. Other attention
        # does not read this.
        "attention_backend": "CPU_MLA",
        "kv_cache_memory_bytes": 1 << 28,
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        # A part of a prompt with a seed ends vLLM's engine (seen with 0.32): it winds the random generator back,
        # which torch cannot do on CPU. So a prompt is always computed as a whole.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(2048, config.max_model_len, config.max_samples),
    }


def _quantization(config: RolloutConfig) -> EngineArguments:
    """Returns the arguments for float8.

    Routers stay as they are, because a token that reaches other experts than the trainer's is not corrected by any
    weight. vLLM's other kernels of experts keep constants in memory whose content sleep mode drops.
    """
    arguments: EngineArguments = {}
    if config.precision == "fp8":
        arguments = {
            "quantization": "fp8_per_channel",
            "quantization_config": {"ignore": [r"re:.*\.(gate|router)$"]},
            "moe_backend": "triton",
        }
    return arguments | ({"kv_cache_dtype": "fp8"} if config.kv_cache_dtype == "fp8" else {})


def check_precision(config: RolloutConfig) -> None:
    """Raises PreconditionFailed (UNSUPPORTED_VERSION) if this host cannot compute in the precision of `config`."""
    key = config.quantized_key
    if not key:
        return
    capability = device_capability()
    if capability is None:
        problem = "this host has no GPU"
    elif capability < _FP8_CAPABILITY:
        problem = f"its GPU has compute capability {capability[0]}.{capability[1]}"
    else:
        return
    raise PreconditionFailed(
        f"rollout.{key} fp8: the engine on host {socket.gethostname()} needs a GPU of compute capability 8.9 or above, "
        f"and {problem}; set rollout.{key} to auto",
        reason=Reason.UNSUPPORTED_VERSION,
        field=f"rollout.{key}",
    )


def check_draft(config: RolloutConfig) -> None:
    """Checks that this host has what is to draft.

    Raises:
        InvalidInput: The head is not here. vLLM would look for it on the Hub first.
        PreconditionFailed: UNSUPPORTED_VERSION, the package for suffix decoding is missing, or is another version.
    """
    speculation = config.speculation
    if isinstance(speculation, SuffixSpeculationConfig):
        require_suffix_decoding()
    if isinstance(speculation, Eagle3SpeculationConfig) and not (speculation.draft / "config.json").is_file():
        raise InvalidInput(
            f"rollout.speculation.draft {speculation.draft}: host {socket.gethostname()} has no such directory with a "
            "config.json; every replica's host needs the head, at this path",
            field="rollout.speculation.draft",
        )


def leave_out_states(arguments: AsyncEngineArgs) -> None:
    """Keeps recurrent states out of the prefix cache of an engine that computes prompts as a whole: vLLM caches them
    only at the ends of parts of prompts."""
    is_whole = arguments.enable_chunked_prefill is False and arguments.enable_prefix_caching is None
    if is_whole and arguments.create_model_config().is_hybrid:
        arguments.enable_prefix_caching = False


def check_adapters_run(arguments: AsyncEngineArgs) -> None:
    """Raises InvalidInput if the model has experts and this device cannot compute adapters beside them."""
    if not torch.cuda.is_available() and arguments.create_model_config().is_moe:
        raise InvalidInput(
            "trainer.lora.publish: with adapters vLLM computes experts in Triton, which needs a GPU; use merged",
            field="trainer.lora.publish",
        )
