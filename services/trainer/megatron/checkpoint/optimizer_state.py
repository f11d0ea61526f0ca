"""Converts the state of Megatron's Adam to sharded tensors: first and second moments, and the weights in float32.

With "fully_reshardable" each model parameter has its own tensors, in its own shape, with and without the distributed
optimizer. With "dp_reshardable" the tensors are the distributed optimizer's flat buffers as they are in memory.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from services.trainer.compat.megatron.optimizer import allocate_hybrid, inner_optimizers, is_hybrid
from services.trainer.megatron.checkpoint.torch_dist import Sharded
from services.trainer.megatron.optim.adam import chained_parts

Resharding = Literal["fully_reshardable", "dp_reshardable"]


def sharded_state(optimizer: MegatronOptimizer, model: Sharded, resharding: Resharding, *, is_loading: bool) -> Sharded:
    """Returns the state of each chained optimizer; `model` has the sharded tensors of all parameters.

    All ranks call it. shard_state loads the fully reshardable state of a distributed optimizer instead.
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
        if index not in loaded:  # the pipeline stage has no adapters, or shard_state loads its state
            continue
        forget_steps(part)
        if not isinstance(part, DistributedOptimizer):
            _copy(_whole_state(part, model), loaded[index])
        else:
            part.load_parameter_state_from_dp_reshardable(loaded[index])


def forget_steps(part: Any) -> None:
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
        if is_hybrid(part):
            allocate_hybrid(part)
        elif part.config.use_precision_aware_optimizer:
            _allocate_precision_aware(part)
        else:
            part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.Adam):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def _adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    return (inner for _, part in chained_parts(optimizer) for inner in inner_optimizers(part))


def _allocate_precision_aware(part: Any) -> None:
    """Does what init_state_fn does, which in Megatron-Core 0.16 supports only TransformerEngine before 2.1."""
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            if not part.optimizer.state[parameter]:
                is_bf16 = parameter.dtype is torch.bfloat16
                part.optimizer.initialize_state(parameter, part.config.store_param_remainders and is_bf16)


def _whole_state(part: Any, model: Sharded) -> Sharded:
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


def _bucket_state(part: Any, model: Sharded, index: int, is_loading: bool) -> Sharded:
    state = part.sharded_param_state_dp_reshardable(model, is_loading)
    for name in ("per_bucket_numel", "per_bucket_numel_unpadded"):  # objects that the tensors' shapes make redundant
        del state[name]
    add_prefix_for_sharding(state, f"chained_{index}.")
    return state


def _copy(targets: Sharded, loaded: Sharded) -> None:
    for name, tensors in targets.items():
        for key, shard in tensors.items():
            shard.data.copy_(loaded[name][key])
