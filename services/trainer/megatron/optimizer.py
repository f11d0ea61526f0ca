"""Makes Megatron's Adam, sets its rates, and converts its state to and from sharded tensors.

The state is first and second moments, and the weights in float32. With "fully_reshardable" each model parameter has its
own tensors, in its own shape, with and without the distributed optimizer. With "dp_reshardable" the tensors are the
distributed optimizer's flat buffers as they are in memory.

A distributed optimizer loads a fully reshardable state in batches. Megatron's own template for it
(sharded_param_state_fully_reshardable) has the state of every parameter in every rank's host memory, 12 bytes per
parameter at any data-parallel size. Here a rank reads only the parameters that its shard overlaps, which are also those
that load_parameter_state_from_fully_reshardable uses, one batch of them at a time.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput, Reason
from services.common.weights.plan import split_into_runs
from services.trainer.checkpoint.ranks import gather_json
from services.trainer.compat.megatron.state import allocate_hybrid, inner_optimizers, share_hybrid, take_range
from services.trainer.megatron.settings import make, refusals
from services.trainer.megatron.torch_dist import Sharded, load

Resharding = Literal["fully_reshardable", "dp_reshardable"]

# Limits the host memory of a batch. The parts of one tensor are never split, so a larger one is a batch by itself.
_BATCH_BYTES = 1 << 30
_BYTES_PER_NUMBER = 4


def make_optimizer(
    chunks: Sequence[DistributedDataParallel], config: TrainerConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Makes the optimizer of a trained model's chunks."""
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
    overrides = config.megatron.optimizer_config_kwargs
    options = make(OptimizerConfig, settings, overrides, "megatron.optimizer_config_kwargs")
    if options.optimizer_cpu_offload:
        _require_half_precision_on_gpu(chunks)
    # Those of gpt-oss experts are a row per expert, and Megatron spares only biases of one dimension.
    expert_biases: Any = {ParamKey(name="*_bias"): {"wd_mult": 0.0}}
    with refusals("megatron.optimizer_config_kwargs"):
        groups = get_standard_config_overrides(options) | expert_biases
        return _of_finite_gradients(get_megatron_optimizer(options, list(chunks), groups))


def _of_finite_gradients(optimizer: MegatronOptimizer) -> MegatronOptimizer:
    """Makes `step` apply nothing if the norm that it has just computed is not finite: it would spoil all weights."""
    measure, apply, norms = optimizer.get_grad_norm, optimizer.step_with_ready_grads, [0.0]

    def get_grad_norm() -> float:
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


def chained_parts(optimizer: MegatronOptimizer) -> Iterator[tuple[int, MegatronOptimizer]]:
    """Yields the index and optimizer of the dense and of the expert parameters that this rank trains, if any."""
    for index, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        if not getattr(part, "is_stub_optimizer", False):
            yield index, part


def sharded_state(optimizer: MegatronOptimizer, model: Sharded, resharding: Resharding, *, is_loading: bool) -> Sharded:
    """Returns the state of each chained optimizer; `model` has the sharded tensors of all parameters.

    All ranks call it. load_pieces loads the fully reshardable state of a distributed optimizer instead.
    """
    allocate(optimizer)
    states: Sharded = {}
    for index, part in chained_parts(optimizer):
        if not isinstance(part, DistributedOptimizer):
            states[index] = _whole_state(part, model)
        elif resharding == "dp_reshardable":
            states[index] = _bucket_state(part, model, index, is_loading)
        elif not is_loading:
            # Gathers in host memory on the first data-parallel rank, instead of in device memory on all of them.
            how = {"distrib_optim_fully_reshardable_mem_efficient": True}
            states[index] = part.sharded_param_state_fully_reshardable(model, False, how)
    return {index: state for index, state in states.items() if state}


@torch.no_grad()
def set_state(optimizer: MegatronOptimizer, loaded: Sharded, model: Sharded) -> None:
    """Sets the state that was loaded into the tensors of sharded_state(is_loading=True)."""
    for index, part in chained_parts(optimizer):
        if index not in loaded:  # the pipeline stage has no adapters, or load_pieces loads its state
            continue
        forget_steps(part)
        if not isinstance(part, DistributedOptimizer):
            for name, tensors in _whole_state(part, model).items():
                for key, shard in tensors.items():
                    shard.data.copy_(loaded[index][name][key])
        else:
            part.load_parameter_state_from_dp_reshardable(loaded[index])


def forget_steps(part: MegatronOptimizer) -> None:
    """Removes the step counts before moments are loaded: Megatron would expect them too; set_num_updates sets them."""
    for state in part.optimizer.state.values():
        state.pop("step", None)


def is_gathered(optimizer: MegatronOptimizer, resharding: Resharding) -> bool:
    """Returns whether a state to save is already a copy in host memory (get_parameter_state_dp_zero)."""
    parts = [part for _, part in chained_parts(optimizer)]
    return resharding == "fully_reshardable" and all(isinstance(part, DistributedOptimizer) for part in parts)


def num_updates(optimizer: MegatronOptimizer) -> int:
    """Returns the number of updates so far, for Adam's bias correction."""
    steps = [0]
    for inner in _adams(optimizer):
        steps += [int(group.get("step", 0)) for group in inner.param_groups]
        steps += [int(state["step"]) for state in inner.state.values() if "step" in state]
    return max(steps)


def set_num_updates(optimizer: MegatronOptimizer, number: int) -> None:
    """Sets the number of updates, per parameter group in TransformerEngine's Adam and per parameter in torch's."""
    for inner in _adams(optimizer):
        if isinstance(inner, torch.optim.Adam):
            for state in inner.state.values():
                state["step"] = torch.tensor(float(number))
        else:
            for group in inner.param_groups:
                group["step"] = number


def allocate(optimizer: MegatronOptimizer) -> None:
    """Allocates the moments, which the first update would otherwise allocate."""
    for _, part in chained_parts(optimizer):
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            allocate_hybrid(part.optimizer)
        elif part.config.use_precision_aware_optimizer:
            _allocate_precision_aware(part.optimizer, part.config)
        else:
            part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.Adam):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def _adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    return (inner for _, part in chained_parts(optimizer) for inner in inner_optimizers(part))


def _allocate_precision_aware(optimizer: Any, config: OptimizerConfig) -> None:
    """Does what init_state_fn does, which in Megatron-Core 0.16 supports only TransformerEngine before 2.1."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if not optimizer.state[parameter]:
            has_remainder = config.store_param_remainders and parameter.dtype is torch.bfloat16
            optimizer.initialize_state(parameter, has_remainder)


def _whole_state(part: MegatronOptimizer, model: Sharded) -> Sharded:
    """Returns the state with the names of the distributed optimizer's fully reshardable state."""
    states: Sharded = {}
    for name, shard in model.items():
        main = getattr(shard.data, "main_param", None)
        main = shard.data if main is None else main
        if main in part.optimizer.state:
            moments = part.optimizer.state[main]
            tensors = {"param": main.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
            states[name] = {
                key: make_sharded_optimizer_tensor(shard, tensor, prefix=f"optimizer.state.{key}")
                for key, tensor in tensors.items()
            }
    return states


def _bucket_state(part: DistributedOptimizer, model: Sharded, index: int, is_loading: bool) -> Sharded:
    state = part.sharded_param_state_dp_reshardable(model, is_loading)
    for name in ("per_bucket_numel", "per_bucket_numel_unpadded"):  # objects that the tensors' shapes make redundant
        del state[name]
    add_prefix_for_sharding(state, f"chained_{index}.")
    return state


@dataclass(frozen=True)
class Piece:
    """A parameter that this rank's shard overlaps. `wanted` has its whole sharded tensors as meta tensors, `num_bytes`
    is what they take after reading."""

    part: DistributedOptimizer
    parameter: torch.nn.Parameter
    wanted: Sharded

    @property
    def num_bytes(self) -> int:
        return len(self.wanted) * self.parameter.numel() * _BYTES_PER_NUMBER


def shard_pieces(optimizer: MegatronOptimizer, model: Sharded) -> list[Piece]:
    """Returns what this rank has to read: nothing without the distributed optimizer.

    `model` has the sharded tensors of all parameters.
    """
    shards = {shard.data: shard for shard in model.values()}
    pieces = []
    for part in (part for _, part in chained_parts(optimizer) if isinstance(part, DistributedOptimizer)):
        for parameter in part.model_param_gbuf_map:  # the parameters in some bucket's param_map
            whole = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
            wanted = {
                key: make_sharded_optimizer_tensor(shards[parameter], whole, prefix=f"optimizer.state.{key}")
                for key in ("param", "exp_avg", "exp_avg_sq")
            }
            pieces.append(Piece(part, parameter, wanted))
    return pieces


@torch.no_grad()
def load_pieces(pieces: Sequence[Piece], directory: Path) -> None:
    """Reads and sets all pieces. All ranks call it; ranks with fewer batches read nothing in the last rounds."""
    parts = {id(piece.part): piece.part for piece in pieces}
    for part in parts.values():
        forget_steps(part)
    # The experts of a layer are shards of one tensor, and Megatron's loader needs all of a rank's shards at once.
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.wanted["param"].key, []).append(piece)
    batches = [list(itertools.chain(*batch)) for batch in split_into_runs(groups.values(), _fits_in_batch)]
    num_rounds = max(gather_json(len(batches), torch.device("cpu")))
    for batch in itertools.islice(itertools.chain(batches, itertools.repeat([])), num_rounds):
        loaded = load({index: piece.wanted for index, piece in enumerate(batch)}, directory)
        for index, piece in enumerate(batch):
            take_range(piece.part, piece.parameter, loaded.pop(index))
    for part in parts.values():
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            share_hybrid(part.optimizer)


def _fits_in_batch(batch: Sequence[list[Piece]], group: list[Piece]) -> bool:
    return sum(piece.num_bytes for piece in itertools.chain(*batch, group)) <= _BATCH_BYTES
