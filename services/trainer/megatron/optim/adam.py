"""Makes Megatron's Adam, and sets the learning rate and weight decay of each update."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput, Reason
from services.trainer.megatron.passthrough import make, refusals


def make_optimizer(
    chunks: Sequence[DistributedDataParallel], config: TrainerConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Makes the optimizer of a trained model's chunks.

    Raises:
        InvalidInput: optimizer_config_kwargs has an unknown key, Megatron refuses the combination, or
            optimizer_cpu_offload does not support the weights.
    """
    ddp = chunks[0].ddp_config
    settings = {
        "optimizer": "adam",
        "lr": config.optim.lr,
        "weight_decay": config.optim.weight_decay,
        "adam_beta1": config.optim.betas[0],
        "adam_beta2": config.optim.betas[1],
        "adam_eps": config.optim.eps,
        "clip_grad": config.optim.max_grad_norm,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_distributed_optimizer": ddp.use_distributed_optimizer,
        "overlap_param_gather": ddp.overlap_param_gather,
        # A checkpoint for any layout needs whole float32 weights, not remainders.
        "store_param_remainders": not config.megatron.fully_reshardable,
    }
    given = config.megatron.optimizer_config_kwargs
    options = make(OptimizerConfig, settings, given, "megatron.optimizer_config_kwargs")
    if options.optimizer_cpu_offload:
        _require_half_precision_on_gpu(chunks)
    with refusals("megatron.optimizer_config_kwargs"):
        return _of_finite_gradients(get_megatron_optimizer(options, list(chunks)))


def _of_finite_gradients(optimizer: MegatronOptimizer) -> MegatronOptimizer:
    """Makes `step` apply nothing if the norm that it has just computed is not finite: it would spoil all weights."""
    measure, apply, norms = optimizer.get_grad_norm, optimizer.step_with_ready_grads, [0.0]

    def get_grad_norm() -> Any:
        norms[0] = measure()
        return norms[0]

    def step_with_ready_grads() -> bool:
        return math.isfinite(norms[0]) and apply()

    optimizer.get_grad_norm, optimizer.step_with_ready_grads = get_grad_norm, step_with_ready_grads
    return optimizer


def _require_half_precision_on_gpu(chunks: Sequence[DistributedDataParallel]) -> None:
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        if not parameter.is_cuda or parameter.dtype is torch.float32:
            field = "megatron.optimizer_config_kwargs.optimizer_cpu_offload"
            raise InvalidInput(
                f"{field}: Megatron supports only bfloat16 weights on GPUs, but a weight here is {parameter.dtype} on "
                f"{parameter.device.type}; use megatron.optimizer_offload",
                reason=Reason.INVALID_CONFIG,
                field=field,
            )


def set_rates(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Sets both for the next update. Parameter groups keep their multipliers: 0 for the decay of norms and biases."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
        group["weight_decay"] = weight_decay * group["wd_mult"]


def state_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yields all tensors of the optimizer on the device: float32 weights and moments."""
    for _, part in chained_parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def chained_parts(optimizer: MegatronOptimizer) -> Iterator[tuple[int, Any]]:
    """Yields the index and optimizer of the dense and of the expert parameters that this rank trains, if any."""
    for index, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        if not part.is_stub_optimizer:
            yield index, part
