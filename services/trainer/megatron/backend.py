"""The Megatron-Core backend."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.common.config.megatron import MegatronConfig
from services.common.config.trainer import TrainerConfig
from services.trainer.backend import LossFunction, Role
from services.trainer.megatron.microbatch import MicroBatch
from services.trainer.megatron.model import build_chunks, half_precision, transformer_config, wrap_chunks
from services.trainer.megatron.offload import Offloader
from services.trainer.megatron.optimizer import make_optimizer, set_rates, state_tensors
from services.trainer.megatron.parallel import Parallelism, forget_parallelism
from services.trainer.megatron.role import MegatronModel
from services.trainer.megatron.transformer import read_config
from services.trainer.megatron.weight_map import WeightMap
from services.trainer.megatron.weights import WeightStream, held_parameters, load_checkpoint_weights
from services.trainer.packing import Pack


class MegatronBackend:
    """services.trainer.backend.Backend on Megatron-Core."""

    def __init__(self, config: TrainerConfig, model_path: str, device: torch.device, dtype: torch.dtype):
        self.device = device
        self._config, self._dtype = config, dtype
        self._model_path, self._hf = model_path, read_config(model_path)
        self._map = WeightMap(self._hf)
        self._policy = self._build(config.megatron, is_trained=True)
        self._optimizer = make_optimizer(self._policy.chunks, config, dtype)
        self._policy.config.grad_scale_func = self._optimizer.scale_loss
        self._reference = None
        if config.loss.kl_coef:
            self._reference = self._build(config.reference.megatron or config.megatron, is_trained=False)
        groups = {"params": self._parameter_tensors, "grads": self._gradient_tensors, "optimizer": self._state_tensors}
        self._offloader = Offloader(groups, config.megatron.offloads)
        self._stream = WeightStream(self._held(self._policy), self._map, self._policy.parallelism)
        self._offloader.release("params", "grads", "optimizer")

    def data_rank(self, role: Role) -> int:
        return self._model(role).parallelism.data_rank

    def forward(self, role: Role, packs: Sequence[Pack], temperature: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self._offloader.load("params")
        values = self._model(role).forward(packs, temperature)
        self._offloader.release("params")
        return [tuple(values_2N) for values_2N in values]

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
            value, metrics = loss(*values_2N, micro.pack)
            # Megatron divides by the rows of all ranks, as its own auxiliary losses need; ours is normalised already.
            rows = torch.tensor(micro.num_rows, dtype=torch.int, device=self.device)
            return value * all_rows, rows, (values_2N.detach(), metrics)

        kept = self._policy.accumulate(micros, temperature, collect)
        values = self._policy.from_last_stage([values_2N for values_2N, _ in kept], packs)
        return [values_2N[0] for values_2N in values], self._sum_metrics([metrics for _, metrics in kept])

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
        self._offloader.load("params")
        for chunk in self._policy.chunks:
            if chunk.ddp_config.overlap_param_gather:  # else the last update would be gathered in the next forward
                chunk.start_param_sync(force_sync=True)
        yield from self._stream
        self._offloader.release("params")

    def weight_specs(self) -> list[tuple[str, torch.Tensor]]:
        return self._stream.specs()

    def save(self, directory: Path) -> None:
        raise NotImplementedError

    def load(self, directory: Path) -> None:
        raise NotImplementedError

    def close(self) -> None:
        forget_parallelism()

    def _build(self, megatron: MegatronConfig, *, is_trained: bool) -> MegatronModel:
        timeout_s, seed = self._config.collective_timeout_s, torch.initial_seed() % 2**31
        parallelism = Parallelism(megatron, timeout_s=timeout_s, seed=seed)
        config = transformer_config(self._hf, self._config, megatron, self._dtype)
        bare = [chunk.to(self.device) for chunk in build_chunks(config, self._hf)]
        held = held_parameters(bare, parallelism)
        load_checkpoint_weights(held, self._map, parallelism, self._model_path)
        if is_trained:
            if megatron.moe.freeze_router:
                for parameter in held:
                    parameter.tensor.requires_grad_(".router." not in parameter.name)
            chunks = wrap_chunks(bare, config, megatron)
        else:
            chunks = [half_precision(chunk.requires_grad_(False), config) for chunk in bare]
        return MegatronModel(chunks, config, parallelism)

    def _held(self, model: MegatronModel) -> list[Any]:
        return held_parameters(model.bare_chunks(), model.parallelism)

    def _model(self, role: Role) -> MegatronModel:
        model = self._policy if role is Role.POLICY else self._reference
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
            sums = _broadcast_json(sums, parallelism, self.device)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}

    def _parameter_tensors(self) -> Iterator[torch.Tensor]:
        models = [self._policy, *([self._reference] if self._reference else [])]
        return (parameter.data for model in models for chunk in model.chunks for parameter in chunk.parameters())

    def _gradient_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._policy.chunks:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        return state_tensors(self._optimizer)


def _broadcast_json(value: Any, parallelism: Parallelism, device: torch.device) -> Any:
    """The last pipeline stage's plain data, on all stages."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([text.numel()], device=device)
    dist.broadcast(size, src=parallelism.last_stage_rank, group=parallelism.pp_group)
    if not parallelism.is_last_stage:
        text = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(text, src=parallelism.last_stage_rank, group=parallelism.pp_group)
    return json.loads(bytes(text.cpu().numpy()))
