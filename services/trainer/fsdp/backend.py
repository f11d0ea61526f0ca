"""Implements the FSDP2 backend: every rank holds a shard of every weight and trains on its own samples."""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from services.common.config.trainer import TrainerConfig
from services.common.errors import InternalError, PreconditionFailed
from services.common.routed_experts import RoutedExpertsShape, routed_experts_shape
from services.trainer.adapters import is_adapter, without_adapters
from services.trainer.backend import OPTIMIZER, PARAMS, Backend, LossFunction, Offloader, Part, Role, compute_dtype
from services.trainer.checkpoint.ranks import ThreadedWriter, names_on_all_ranks, typed_errors
from services.trainer.compat.torch import discard_unreduced_gradients
from services.trainer.compat.torch_checkpoint import PlainPlanner, PlainReader, read_metadata
from services.trainer.compat.transformers import routers, set_choice
from services.trainer.fsdp.loading import build, reshard
from services.trainer.fsdp.lora import AdapterStream
from services.trainer.fsdp.model import Layout, LogprobModel, ValueModel, WeightStream, local_shard
from services.trainer.router_replay import LayerReplay, ModelReplay
from services.trainer.updates.optim import make_optimizers
from services.trainer.updates.packing import Microbatch

_log = logging.getLogger(__name__)
_State = dict[str, Any]  # as torch.distributed.checkpoint calls it

# Files of each rank in a checkpoint: they are written, and later compared with the manifest, at the same time.
_NUM_WRITERS = 4


def make_replay(causal_lm: PreTrainedModel, shape: RoutedExpertsShape, device: torch.device) -> ModelReplay:
    """Makes the layers of experts compute with the routed experts of micro-batches that have them."""
    known = routers(causal_lm)
    if len(known) != len(shape.expert_layers):
        raise InternalError(
            f"{len(known)} routers are known in a model of {len(shape.expert_layers)} layers of experts"
        )
    layers = {number: LayerReplay() for number in shape.expert_layers}
    for router, layer in zip(known, layers.values(), strict=True):
        set_choice(router, layer.choose)
    return ModelReplay(layers, device)


class FsdpBackend(Backend):
    """Implements a role on torch FSDP2."""

    def __init__(self, role: Role, config: TrainerConfig, model_path: str, device: torch.device):
        self.device = device
        self._role, self._config, dtype = role, config, compute_dtype(config, device)
        self.saves_in_background = config.fsdp.async_save
        # A background thread writes with its own group, so that its collectives do not mix with those of training.
        timeout = timedelta(seconds=config.collective_timeout_s)
        writers = dist.new_group(backend="gloo", timeout=timeout) if self.saves_in_background else None
        assert not isinstance(writers, int)  # this rank is in the group
        self._writers = writers
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        kind = ValueModel if role is Role.CRITIC else LogprobModel
        kept = dtype if role.is_frozen or config.lora.rank else torch.float32  # what is trained is float32
        self._model = build(kind, model_path, config, self._mesh, weight_dtype=kept, compute_dtype=dtype)
        groups: dict[str, Callable[[], Iterator[torch.Tensor]]] = {
            PARAMS: lambda: map(local_shard, self._model.parameters())
        }
        if self.data_rank == 0:
            _log.info("%s: attention is computed by %s", role, self._model.attention(device, dtype))
        if role.is_frozen:
            self._model.requires_grad_(False)
        else:
            groups[OPTIMIZER] = self._state_tensors
            layers = f"causal_lm.{self._model.structure.layers}."
            self._optimizers = make_optimizers(config.optim, self._model.named_parameters(), layers)
        self.offloader = Offloader(groups, frozenset(), device)
        self._replay: ModelReplay | None = None
        if role is Role.POLICY:
            self._stream = WeightStream(self._model.causal_lm, dtype, device)
            self._adapters = AdapterStream(self._model.causal_lm, self._stream)
            shape = routed_experts_shape((Path(model_path) / "config.json").read_bytes())
            if shape and config.uses_router_replay:
                self._replay = make_replay(self._model.causal_lm, shape, device)

    @property
    def data_rank(self) -> int:
        return self._mesh.get_rank()

    @property
    def pads_rows(self) -> bool:
        return self._model.layout is Layout.ROWS

    def forward(self, microbatches: Sequence[Microbatch], temperature: float) -> list[torch.Tensor]:
        with torch.no_grad(), self._passes():
            outputs = [self._outputs(microbatch, temperature) for microbatch in microbatches]
        reshard(self._model)
        return outputs

    def forward_base(self, microbatches: Sequence[Microbatch], temperature: float) -> list[torch.Tensor]:
        with without_adapters([self._model]):
            return self.forward(microbatches, temperature)

    def accumulate(
        self, microbatches: Sequence[Microbatch], temperature: float, loss: LossFunction, *, is_whole: bool
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        assert isinstance(self._model, FSDPModule)  # fully_shard changed its class
        outputs: list[torch.Tensor] = []
        collected: list[dict[str, torch.Tensor]] = []
        with self._passes():
            for index, microbatch in enumerate(microbatches):
                is_last = index == len(microbatches) - 1
                # One reduction for all micro-batches, for which each rank keeps whole gradients until then.
                self._model.set_requires_gradient_sync(is_last or self._config.fsdp.reduce_each_microbatch)
                outputs_KN = self._outputs(microbatch, temperature)
                value, metrics = loss(outputs_KN, microbatch)
                # The loss is already divided by global counts, but FSDP averages over ranks: undo that division.
                (value * self._mesh.size()).backward()
                # A copy, because a view would keep all rows in memory, such as those of a teacher's tokens.
                outputs.append(outputs_KN[:2].detach().clone())
                collected.append(metrics)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        # Each total is a collective, so all ranks need the same names in the same order.
        names = names_on_all_ranks(collected, self.device)
        totals = {name: sum((one[name] for one in collected if name in one), zero) for name in names}
        return outputs, {name: self.reduce(total, dist.ReduceOp.SUM) for name, total in totals.items()}

    def complete_blocks(self, factor: float) -> None:
        reshard(self._model)
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def replayed(self) -> torch.Tensor:
        assert self._replay is not None, "only the policy's micro-batches have routed experts, of a model with experts"
        return self._replay.counts()

    def reduce(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        dist.all_reduce(value, op=op)
        return value

    def step(self, lr: float, weight_decay: float) -> float:
        reshard(self._model)  # gathered weights are in place of the shards, which have the gradients
        for group in self._groups():
            group.update(lr=lr, weight_decay=weight_decay * group["wd_mult"])
        # torch does not choose foreach (or fused, in the optimizer) by itself for sharded tensors.
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optim.max_grad_norm, foreach=True)
        assert isinstance(norm, DTensor)  # because the gradients are
        found = float(norm.full_tensor())
        if math.isfinite(found):
            for optimizer in self._optimizers:
                optimizer.step()
        self.discard_gradients()
        return found

    def discard_gradients(self) -> None:
        reshard(self._model)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        discard_unreduced_gradients(self._model)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._adapters.merged()

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._stream

    def adapter(self, *, of_modules: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._adapters.named(of_modules=of_modules)

    def adapter_specs(self) -> list[tuple[str, torch.Tensor]]:
        return self._adapters.specs()

    def weight_specs(self) -> list[tuple[str, torch.Tensor]]:
        return self._stream.specs()

    def save(self, directory: Path) -> None:
        self._write(self._state(), directory)

    def begin_save(self, directory: Path) -> Callable[[], None]:
        return partial(self._write, _copied(self._state()), directory)

    def _write(self, state: _State, directory: Path) -> None:
        with typed_errors(directory, done="written"):
            writer = ThreadedWriter(directory, num_threads=_NUM_WRITERS)
            dcp.save(state, storage_writer=writer, process_group=self._writers)

    def load(self, directory: Path) -> None:
        state = self._state()
        model, optimizer = state["model"], state["optimizer"]
        self._require_tensors_of(model, optimizer, directory)
        with typed_errors(directory, done="read"):
            dcp.load(state, storage_reader=PlainReader(directory), planner=PlainPlanner())
        options = StateDictOptions(strict=not self._config.lora.rank)  # the frozen base is in no checkpoint
        set_state_dict(
            self._model, self._optimizers, model_state_dict=model, optim_state_dict=optimizer, options=options
        )
        for group in self._groups():
            if "betas" in group:  # AdamW's; loading also set the values of the saved config
                group.update(betas=self._config.optim.betas, eps=self._config.optim.eps)

    def release(self, parts: Collection[Part]) -> None:
        if Part.OPTIMIZER in parts and not self._role.is_frozen:
            self.discard_gradients()
        reshard(self._model)
        super().release(parts)

    def close(self) -> None:
        pass

    def _passes(self) -> AbstractContextManager[None]:
        return self._replay.passes() if self._replay else nullcontext()

    def _outputs(self, microbatch: Microbatch, temperature: float) -> torch.Tensor:
        if self._replay:
            self._replay.feed(microbatch.experts_TLK)
        return self._model(microbatch, temperature)

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (local_shard(value) for value in state.values() if torch.is_tensor(value))

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def _require_tensors_of(self, model: _State, optimizer: _State, directory: Path) -> None:
        """Raises PreconditionFailed unless the checkpoint has exactly these tensors: without one, torch crashes."""
        saved = read_metadata(directory).state_dict_metadata.items()
        tensors = {name: stored.size for name, stored in saved if isinstance(stored, TensorStorageMetadata)}
        there = {name: list(size) for name, size in tensors.items() if name.startswith(("model.", "optimizer.state."))}
        here = {f"model.{name}": list(tensor.shape) for name, tensor in model.items()} | {
            f"optimizer.state.{name}.{moment}": list(tensor.shape)
            for name, moments in optimizer["state"].items()
            for moment, tensor in moments.items()
        }
        if different := sorted(name for name in there | here if there.get(name) != here.get(name)):
            name = different[0]
            raise PreconditionFailed(
                f"checkpoint {directory} was saved by another role, model or strategy than this {self._role}: "
                f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here; "
                "open it with the config that it was saved under"
            )

    def _state(self) -> _State:
        fresh = [optimizer for optimizer in self._optimizers if not optimizer.state]
        model, optimizer = get_state_dict(self._model, self._optimizers)
        for one in fresh:  # torch made the state by an update with zero gradients, which starts at no number
            for moments in one.state.values():
                if "step" in moments:  # Adam's bias correction
                    moments["step"].zero_()
        if self._config.lora.rank:
            model = {name: tensor for name, tensor in model.items() if is_adapter(name)}
        return {"model": model, "optimizer": optimizer}


def _copied(state: Any) -> Any:
    """Returns a state dict with copies of its tensors in host memory."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: _copied(part) for name, part in cast(_State, state).items()}
    return [_copied(part) for part in cast(list[object], state)] if isinstance(state, list) else state
