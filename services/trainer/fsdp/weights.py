"""Whole weights out of FSDP's shards, many at a time, under the names and in the parts that checkpoints use."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from services.trainer.compat.torch import is_persistent

# Parameters that are gathered in one collective hold about this many entries.
_RUN_NUMEL = 32 << 20

_Named = list[tuple[str, nn.Parameter]]


class WeightStream:
    """The policy in checkpoint names, always in the same order, in `dtype`; some tens of MB at a time.

    Buffers that are in the checkpoint, a router's correction for one, come last, in their own dtype.
    """

    def __init__(self, causal_lm: PreTrainedModel, dtype: torch.dtype, device: torch.device):
        self._causal_lm, self._dtype, self._device = causal_lm, dtype, device
        self._runs = list(_runs(list(causal_lm.named_parameters())))
        self._owners = list(_buffer_owners(causal_lm))
        specs = ((name, self._meta(parameter)) for name, parameter in causal_lm.named_parameters())
        self._specs = {name: self._as_checkpoint(name, spec) for name, spec in (*specs, *self._buffers())}

    def specs(self) -> list[tuple[str, torch.Tensor]]:
        """Names and meta tensors."""
        return [(name, tensor.to("meta")) for specs in self._specs.values() for name, tensor in specs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for run in self._runs:
            for (name, _), whole in zip(run, self._gather([parameter for _, parameter in run]), strict=True):
                is_renamed = [spec for spec, _ in self._specs[name]] != [name]
                yield from self._as_checkpoint(name, whole) if is_renamed else [(name, whole)]
        for name, buffer in self._buffers():
            yield from self._as_checkpoint(name, buffer)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, owner, attribute in self._owners:
            yield name, getattr(owner, attribute)

    def _gather(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        # Cast the shards, not the whole: half the bytes to gather.
        local = [_local(parameter).to(self._device, self._dtype) for parameter in parameters]
        world = dist.get_world_size()
        if world == 1:
            return local
        numel = [[_shard_shape(p.shape, rank, world).numel() for p in parameters] for rank in range(world)]
        own = torch.zeros(sum(numel[0]), dtype=self._dtype, device=self._device)  # rank 0 has the most
        own[: sum(numel[dist.get_rank()])] = torch.cat([tensor.reshape(-1) for tensor in local])
        gathered = torch.empty(world, own.numel(), dtype=self._dtype, device=self._device)
        dist.all_gather_into_tensor(gathered.view(-1), own)
        shards = [gathered[rank, : sum(numel[rank])].split(numel[rank]) for rank in range(world)]
        wholes = [torch.cat(of_ranks) for of_ranks in zip(*shards, strict=True)]
        return [whole.view(parameter.shape) for whole, parameter in zip(wholes, parameters, strict=True)]

    def _as_checkpoint(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """transformers fuses some weights in memory (experts); its own rule takes them apart again."""
        return list(revert_weight_conversion(self._causal_lm, {name: tensor}).items())

    def _meta(self, parameter: nn.Parameter) -> torch.Tensor:
        return torch.empty(parameter.shape, dtype=self._dtype, device="meta")


def _buffer_owners(causal_lm: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Name in the checkpoint, the module that has it, and its name there."""
    for path, module in causal_lm.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            if is_persistent(module, name):
                yield f"{path}.{name}", module, name


def _local(parameter: nn.Parameter) -> torch.Tensor:
    # In this order: whatever a DTensor itself is asked to do takes it tens of microseconds.
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _shard_shape(shape: torch.Size, rank: int, world: int) -> torch.Size:
    """Rows are cut like torch.chunk does: equal parts, the last ones shorter or empty."""
    most = -(-shape[0] // world)
    return torch.Size([max(0, min(most, shape[0] - rank * most)), *shape[1:]])


def _runs(named: _Named) -> Iterator[_Named]:
    run: _Named = []
    for name, parameter in named:
        if run and sum(p.numel() for _, p in run) + parameter.numel() > _RUN_NUMEL:
            yield run
            run = []
        run.append((name, parameter))
    yield run
