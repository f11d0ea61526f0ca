"""Gathers whole weights from FSDP's shards, many at a time, with the names and shapes of the checkpoint."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from services.common.compat.torch import Copies
from services.common.weights.plan import split_into_runs
from services.trainer.adapters import is_adapter
from services.trainer.compat.torch import is_persistent

# One collective gathers parameters of about this many entries in total.
_RUN_NUMEL = 32 << 20


class WeightStream:
    """Iterates over the policy's tensors under checkpoint names, always in the same order, in `dtype`.

    Adapters are left out. It gathers some tens of MB at a time. Buffers that checkpoints contain, such as a router's
    correction, come last and keep their dtype.
    """

    def __init__(self, causal_lm: PreTrainedModel, dtype: torch.dtype, device: torch.device):
        self._causal_lm, self._dtype, self._device = causal_lm, dtype, device
        named = [(name, parameter) for name, parameter in causal_lm.named_parameters() if not is_adapter(name)]
        self._runs = list(split_into_runs(named, _fits_in_run))
        # Each buffer's name in the checkpoint, its module, and its name in the module.
        self._owners = [
            (f"{path}.{name}", module, name)
            for path, module in causal_lm.named_modules()
            for name, _ in module.named_buffers(recurse=False)
            if is_persistent(module, name)
        ]
        specs = ((name, self.meta(parameter)) for name, parameter in named)
        self._specs = {name: self._as_checkpoint(name, spec) for name, spec in (*specs, *self._buffers())}

    def specs(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.to("meta")) for specs in self._specs.values() for name, tensor in specs]

    def checkpoint_name(self, parameter: str) -> str | None:
        """Returns the checkpoint's name of a whole parameter; None if checkpoints have it in other tensors."""
        specs, shape = self._specs[parameter], self._causal_lm.get_parameter(parameter).shape
        return specs[0][0] if [spec.shape for _, spec in specs] == [shape] else None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for run in self._runs:
            for (name, _), whole in zip(run, self.gather([parameter for _, parameter in run]), strict=True):
                is_changed = [(stored, spec.shape) for stored, spec in self._specs[name]] != [(name, whole.shape)]
                yield from self._as_checkpoint(name, whole) if is_changed else [(name, whole)]
        for name, buffer in self._buffers():
            yield from self._as_checkpoint(name, buffer)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, owner, attribute in self._owners:
            yield name, getattr(owner, attribute)

    def gather(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Returns whole parameters. All ranks call it together."""
        local, world = [local_shard(parameter) for parameter in parameters], dist.get_world_size()
        if world == 1 and all(tensor.device == self._device and tensor.dtype == self._dtype for tensor in local):
            return local
        # Cast before gathering, which halves the bytes.
        numel = [[_shard_shape(p.shape, rank, world).numel() for p in parameters] for rank in range(world)]
        own = torch.empty(sum(numel[0]), dtype=self._dtype, device=self._device)  # rank 0 has the largest shard
        places = own[: sum(numel[dist.get_rank()])].split(numel[dist.get_rank()])
        targets = [place.view(tensor.shape) for place, tensor in zip(places, local, strict=True)]
        Copies(targets, local).run()  # a copy for each would cost more time than its bytes
        if world == 1:
            return targets
        gathered = torch.empty(world, own.numel(), dtype=self._dtype, device=self._device)
        dist.all_gather_into_tensor(gathered.view(-1), own)
        shards = [gathered[rank, : sum(numel[rank])].split(numel[rank]) for rank in range(world)]
        wholes = [torch.cat(of_ranks) for of_ranks in zip(*shards, strict=True)]
        return [whole.view(parameter.shape) for whole, parameter in zip(wholes, parameters, strict=True)]

    def _as_checkpoint(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Splits weights that transformers fuses in memory, such as experts, by transformers' own rule."""
        return list(revert_weight_conversion(self._causal_lm, {name: tensor}).items())

    def meta(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns a whole parameter's shape and its dtype in the stream as a meta tensor."""
        return torch.empty(parameter.shape, dtype=self._dtype, device="meta")


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a parameter or of its optimizer state, without gradient."""
    # to_local first: each operation on the DTensor itself costs tens of microseconds.
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _shard_shape(shape: torch.Size, rank: int, world: int) -> torch.Size:
    """Returns the shape of a rank's shard. Rows are cut as by torch.chunk: equal parts, the last shorter or empty."""
    most = -(-shape[0] // world)
    return torch.Size([max(0, min(most, shape[0] - rank * most)), *shape[1:]])


def _fits_in_run(run: list[tuple[str, nn.Parameter]], named: tuple[str, nn.Parameter]) -> bool:
    return sum(parameter.numel() for _, parameter in (*run, named)) <= _RUN_NUMEL
