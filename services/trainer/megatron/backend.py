"""The Megatron-Core backend."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.common.architecture import Architecture, read_architecture
from services.common.config.megatron import MegatronConfig
from services.common.config.trainer import TrainerConfig
from services.common.layout import check_layout
from services.trainer.backend import LossFunction, Role
from services.trainer.megatron.checkpoint import Checkpointer, SavedUnder, load_converted_weights
from services.trainer.megatron.lora import add_adapters, merged_values, without_adapters
from services.trainer.megatron.lora_map import AdapterMap
from services.trainer.megatron.microbatch import MicroBatch
from services.trainer.megatron.model import build_chunks, half_precision, transformer_config, wrap_chunks
from services.trainer.megatron.offload import Offloader
from services.trainer.megatron.optimizer import make_optimizer, set_rates, state_tensors
from services.trainer.megatron.parallel import Parallelism, forget_parallelism
from services.trainer.megatron.role import MegatronModel
from services.trainer.megatron.transformer import read_config
from services.trainer.megatron.weight_map import WeightMap
from services.trainer.megatron.weights import WeightStream, gather_json, held_parameters, load_checkpoint_weights
from services.trainer.packing import Pack


class MegatronBackend:
    """services.trainer.backend.Backend on Megatron-Core."""

    def __init__(self, config: TrainerConfig, model_path: str, device: torch.device, dtype: torch.dtype):
        self.device = device
        self._config, self._dtype = config, dtype
        self._model_path, self._hf = model_path, read_config(model_path)
        self._check_layouts(read_architecture(model_path))
        self._map = WeightMap(self._hf)
        self._policy = self._reference = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        config = self._config
        self._policy = self._build(config.megatron, is_trained=True)
        self._optimizer = make_optimizer(self._policy.chunks, config, self._dtype)
        self._policy.config.grad_scale_func = self._optimizer.scale_loss
        if config.loss.kl_coef and not self._is_reference_the_base:
            self._reference = self._build(config.reference.megatron or config.megatron, is_trained=False)
        groups = {"params": self._parameter_tensors, "grads": self._gradient_tensors, "optimizer": self._state_tensors}
        self._offloader = Offloader(groups, config.megatron.offloads)
        self._stream, self._base, self._adapter = self._streams()
        self._checkpointer = Checkpointer(
            self._policy, self._optimizer, config, SavedUnder.of(config, self._hf.model_type, self.device)
        )
        self._offloader.release("params", "grads", "optimizer")

    def data_rank(self, role: Role) -> int:
        return self._model(role).parallelism.data_rank

    def forward(self, role: Role, packs: Sequence[Pack], temperature: float) -> list[torch.Tensor]:
        self._offloader.load("params")
        model = self._model(role)
        with without_adapters(model.bare_chunks()) if role is Role.REFERENCE else contextlib.nullcontext():
            values = model.forward(packs, temperature)
        self._offloader.release("params")
        return values

    def accumulate(
        self, packs: Sequence[Pack], temperature: float, loss: LossFunction
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        self._offloader.load("params", "grads")
        for chunk in self._policy.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        micros = self._policy.cut(packs)
        all_rows = self._count_rows(micros)

        def collect(micro: MicroBatch, values_2N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            value, metrics = loss(values_2N, micro.pack)
            # Megatron divides by the rows of all ranks, as its own auxiliary losses need; ours is normalised already.
            rows = torch.tensor(micro.num_rows, dtype=torch.int, device=self.device)
            return value * all_rows, rows, (values_2N.detach(), metrics)

        kept = self._policy.accumulate(micros, temperature, collect)
        values = self._policy.from_last_stage([values_2N for values_2N, _ in kept], packs)
        return values, self._sum_metrics([metrics for _, metrics in kept])

    def reduce(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        dist.all_reduce(value, op=op, group=self._policy.parallelism.dp_group)
        return value

    def step(self, lr: float, weight_decay: float) -> float:
        if self._config.megatron.empty_cuda_cache and self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._policy.parallelism.activate()
        self._offloader.load("optimizer")
        set_rates(self._optimizer, lr, weight_decay)
        _, norm, _ = self._optimizer.step()
        self._offloader.release("optimizer")
        self.discard_gradients()
        return float(norm)

    def discard_gradients(self) -> None:
        self._offloader.release("grads", "params")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._streamed(self._stream)

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._adapter is not None:
            yield from self._streamed(self._adapter)

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._streamed(self._base)

    def adapter_specs(self) -> list[tuple[str, torch.Tensor]]:
        return self._adapter.specs() if self._adapter is not None else []

    def weight_specs(self) -> list[tuple[str, torch.Tensor]]:
        return self._stream.specs()

    def save(self, directory: Path) -> Callable[[], None] | None:
        self._offloader.load("params", "optimizer")
        self._finish_update()
        write = self._checkpointer.save(directory)
        self._offloader.release("params", "optimizer")
        return write

    def load(self, directory: Path) -> None:
        self._offloader.load("params", "optimizer")
        self._checkpointer.load(directory)
        self._offloader.release("params", "optimizer")

    def close(self) -> None:
        for model in filter(None, (self._policy, self._reference)):
            model.close()
        forget_parallelism()

    def _check_layouts(self, architecture: Architecture) -> None:
        """By the ranks and the model that are really here, before any process group is made."""
        megatron, budget = self._config.megatron, self._config.max_tokens_per_microbatch
        keys = {"trainer.megatron": megatron, "trainer.reference.megatron": self._config.reference.megatron or megatron}
        for key, sizes in keys.items():
            check_layout(sizes, dist.get_world_size(), architecture=architecture, max_tokens=budget, key=key)

    def _build(self, megatron: MegatronConfig, *, is_trained: bool) -> MegatronModel:
        timeout_s, seed = self._config.collective_timeout_s, torch.initial_seed() % 2**31
        is_adapted = is_trained and self._config.lora.rank > 0
        parallelism = Parallelism(megatron, timeout_s=timeout_s, seed=seed)
        config = transformer_config(self._hf, self._config, megatron, self._dtype)
        bare = [chunk.to(self.device) for chunk in build_chunks(config, self._hf, is_adapted=is_adapted)]
        held = held_parameters(bare, parallelism)
        if megatron.dist_checkpointing_path:
            load_converted_weights(bare, parallelism, megatron.dist_checkpointing_path)
        else:
            load_checkpoint_weights(held, self._map, parallelism, self._model_path)
        if is_trained:
            if megatron.moe.freeze_router:
                for parameter in held:
                    parameter.tensor.requires_grad_(".router." not in parameter.name)
            if is_adapted:
                add_adapters(bare, self._config.lora, parallelism, seed=seed)
            chunks = wrap_chunks(bare, config, megatron)
        else:
            chunks = [half_precision(chunk.requires_grad_(False), config) for chunk in bare]
        return MegatronModel(chunks, config, parallelism)

    def _finish_update(self) -> None:
        for chunk in self._policy.chunks:
            if chunk.ddp_config.overlap_param_gather:  # else the last update would be gathered in the next forward
                chunk.start_param_sync(force_sync=True)

    def _streamed(self, stream: WeightStream) -> Iterator[tuple[str, torch.Tensor]]:
        self._offloader.load("params")
        self._finish_update()
        yield from stream
        self._offloader.release("params")

    def _streams(self) -> tuple[WeightStream, WeightStream, WeightStream | None]:
        """The merged policy, its base and, if it has adapters, those alone."""
        chunks, parallelism = self._policy.bare_chunks(), self._policy.parallelism
        held = held_parameters(chunks, parallelism)
        merged = WeightStream(held, self._map, parallelism, self.device, merged_values(chunks))
        if not self._config.lora.rank:
            return merged, merged, None
        base = WeightStream(held, self._map, parallelism, self.device)
        adapters = held_parameters(chunks, parallelism, adapters=True)
        return merged, base, WeightStream(adapters, AdapterMap(self._map), parallelism, self.device)

    @property
    def _is_reference_the_base(self) -> bool:
        """The frozen base under the adapters is the reference, unless that has parallel sizes of its own."""
        return self._config.lora.rank > 0 and self._config.reference.megatron is None

    def _model(self, role: Role) -> MegatronModel:
        is_policy = role is Role.POLICY or self._is_reference_the_base
        model = self._policy if is_policy else self._reference
        assert model is not None, "the servicer refuses a role that is not held"
        return model

    def _count_rows(self, micros: Sequence[MicroBatch]) -> int:
        rows = torch.tensor([sum(micro.num_rows for micro in micros)], device=self.device)
        dist.all_reduce(rows, group=self._policy.parallelism.dp_cp_group)
        return int(rows)

    def _sum_metrics(self, kept: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Over micro-batches and ranks with different samples; told to the earlier pipeline stages."""
        parallelism = self._policy.parallelism
        sums: dict[str, float] = {}
        if parallelism.is_last_stage:
            totals = torch.stack([torch.stack([metrics[name] for metrics in kept]).sum() for name in kept[0]])
            sums = dict(zip(kept[0], self.reduce(totals, dist.ReduceOp.SUM).tolist(), strict=True))
        if self._policy.config.pipeline_model_parallel_size > 1:
            sums = gather_json(sums, self.device, parallelism.pp_group)[-1]
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}

    def _parameter_tensors(self) -> Iterator[torch.Tensor]:
        models = [self._policy, *([self._reference] if self._reference else [])]
        return (parameter.data for model in models for chunk in model.chunks for parameter in chunk.parameters())

    def _gradient_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._policy.chunks:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        return state_tensors(self._optimizer)
