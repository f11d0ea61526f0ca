"""Implements the Megatron-Core backend."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from services.common.config.layout import check_layout
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.common.weights.buckets import Item
from services.trainer.adapters import without_adapters
from services.trainer.backend import GRADS, OPTIMIZER, PARAMS, Backend, LossFunction, Offloader, Role, compute_dtype
from services.trainer.checkpoint.ranks import gather_json, names_on_all_ranks, same_on_all_ranks
from services.trainer.compat.megatron.state import NO_GROUPS, rng_tracker, set_groups
from services.trainer.megatron import settings
from services.trainer.megatron.checkpoint import Checkpointer, SavedUnder, load_converted_weights
from services.trainer.megatron.lora import adapted_layers, adapter_part, add_adapters
from services.trainer.megatron.microbatch import MicrobatchShard
from services.trainer.megatron.model import LogprobModel, ValueModel, build_chunks, half_precision, maker, wrap_chunks
from services.trainer.megatron.optimizer import make_optimizer, set_rates, state_tensors
from services.trainer.megatron.role import Collect, MegatronModel, Parallelism
from services.trainer.megatron.stream import WeightStream
from services.trainer.megatron.weights import WeightMap, load_checkpoint_weights, local_parameters, require_loadable
from services.trainer.updates.packing import Microbatch

T = TypeVar("T")


class MegatronBackend(Backend):
    """Implements a role on Megatron-Core."""

    def __init__(self, role: Role, config: TrainerConfig, model_path: str, device: torch.device):
        self.device = device
        self._role, self._config, self._dtype = role, config, compute_dtype(config, device)
        self._model_path, self.saves_in_background = model_path, config.megatron.async_save
        key = f"{'trainer' if role is Role.POLICY else role}.megatron"
        with same_on_all_ranks():
            self._hf = settings.read_config(model_path)
            architecture = settings.model_architecture(self._hf)
            check_layout(  # against the real world size and model, before any process group is made
                config.megatron,
                dist.get_world_size(),
                architecture=architecture,
                max_tokens=config.max_tokens_per_microbatch,
                key=key,
            )
            settings.require_float8(config.megatron, device, key)
            if role is Role.CRITIC and config.megatron.use_mbridge:
                raise InvalidInput(f"{key}.use_mbridge: mbridge builds no value models", field=f"{key}.use_mbridge")
            if not config.megatron.dist_checkpointing_path:
                require_loadable(architecture, model_path, is_critic=role is Role.CRITIC)
        self._map = WeightMap(architecture)
        if config.megatron.use_mbridge:
            from services.trainer.megatron import mbridge  # late, because it needs an extra

            mbridge.prove(self._hf, config, device, key=key)
        self._has_blocks = False
        self._closing = contextlib.ExitStack()
        self._closing.callback(set_groups, NO_GROUPS)  # the groups exist until torch.distributed shuts down
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        config = self._config
        self._model = self._build()
        self._closing.callback(self._model.close)
        parameters = lambda: (parameter.data for chunk in self._model.chunks for parameter in chunk.parameters())  # noqa: E731
        groups: dict[str, Callable[[], Iterator[torch.Tensor]]] = {PARAMS: parameters}
        if not self._role.is_frozen:
            self._optimizer = make_optimizer(self._model.ddp_chunks(), config, self._dtype)
            self._model.config.grad_scale_func = self._optimizer.scale_loss
            own = SavedUnder.of(config, self._role, self._hf.model_type, self.device)
            self._checkpointer = Checkpointer(self._model, self._optimizer, config, own)
            groups |= {GRADS: self._gradient_tensors, OPTIMIZER: lambda: state_tensors(self._optimizer)}
        self.offloader = Offloader(groups, config.megatron.offloads, self.device)
        if self._role is Role.POLICY:
            self._make_streams()
            if config.uses_router_replay and self._map.model.num_experts:
                self._model.enable_router_replay()
        # From here on, each phase loads what it needs.
        self.offloader.offload(*groups)

    @contextlib.contextmanager
    def keep_generators(self) -> Iterator[None]:
        states = rng_tracker().get_states()
        try:
            with super().keep_generators():
                yield
        finally:
            rng_tracker().set_states(states)

    @property
    def data_rank(self) -> int:
        return self._model.parallelism.data_rank

    def forward(self, microbatches: Sequence[Microbatch], temperature: float) -> list[torch.Tensor]:
        self.offloader.load(PARAMS)
        values = self._model.forward(microbatches, temperature)
        self.offloader.offload(PARAMS)
        return values

    def forward_base(self, microbatches: Sequence[Microbatch], temperature: float) -> list[torch.Tensor]:
        with without_adapters(self._model.bare_chunks()):
            return self.forward(microbatches, temperature)

    def accumulate(
        self, microbatches: Sequence[Microbatch], temperature: float, loss: LossFunction, *, is_whole: bool
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        if is_whole or not self._has_blocks:
            self.offloader.load(PARAMS, GRADS)
            for chunk in self._model.ddp_chunks():
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
        self.offloader.load(PARAMS)  # a forward since the last block has released them
        self._has_blocks = not is_whole
        shards = self._model.cut(microbatches)
        # Megatron divides a whole update by all ranks' rows, which its auxiliary losses need; ours is divided already.
        collect = self._collect(loss, self._count_rows(shards) if is_whole else 1)
        collected = self._model.accumulate(shards, temperature, collect, is_whole=is_whole)
        values = self._model.from_last_stage([outputs_KN for outputs_KN, _ in collected], microbatches)
        return values, self._sum_metrics([metrics for _, metrics in collected])

    def complete_blocks(self, factor: float) -> None:
        self.offloader.load(PARAMS)  # which the step needs too
        self._model.complete_blocks(factor)

    def replayed(self) -> torch.Tensor:
        assert self._model.replay is not None, "only micro-batches of the policy have routed experts"
        return self._model.replay.counts()

    def reduce(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        dist.all_reduce(value, op=op, group=self._model.parallelism.dp_group)
        return value

    def step(self, lr: float, weight_decay: float) -> float:
        if self._config.megatron.empty_cuda_cache and self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._model.parallelism.activate()
        self.offloader.load(OPTIMIZER)
        set_rates(self._optimizer, lr, weight_decay)
        _, norm, _ = self._optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]  the abstract method has no annotation
        self.offloader.offload(OPTIMIZER)
        self.discard_gradients()
        return math.inf if norm is None else float(norm)  # None: Megatron has found it while it undid a loss scale

    def discard_gradients(self) -> None:
        self._has_blocks = False
        self.offloader.offload(GRADS, PARAMS)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._streamed(self._stream.to_first())

    def spans(self) -> Iterator[Item]:
        yield from self._streamed(self._stream.spans_to_first())

    def sent_weights(self, bucket_bytes: int) -> Iterator[Iterator[Item]]:
        yield from self._streamed(self._stream.to_senders(bucket_bytes))

    def adapter(self, *, of_modules: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._streamed(self._adapter.to_first())  # modules have the checkpoint's names in every family

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._streamed(self._base.to_first())

    def adapter_specs(self) -> list[tuple[str, torch.Tensor]]:
        return self._adapter.specs()

    def weight_specs(self) -> list[tuple[str, torch.Tensor]]:
        return self._stream.specs()

    def sender_slots(self, bucket_bytes: int) -> list[tuple[int, int]]:
        slots = self._stream.slots(bucket_bytes)
        # Where rank 0 would send every slot, no slots are needed.
        return slots if any(rank for rank, _ in slots) else []

    def save(self, directory: Path) -> None:
        with self._saving():
            self._checkpointer.begin_save(directory, is_copied=False)()

    def begin_save(self, directory: Path) -> Callable[[], None]:
        with self._saving():
            return self._checkpointer.begin_save(directory, is_copied=True)

    def load(self, directory: Path) -> None:
        self.offloader.load(PARAMS, OPTIMIZER)
        self._checkpointer.load(directory)
        self.offloader.offload(PARAMS, OPTIMIZER)

    def close(self) -> None:
        self._closing.close()

    def _build(self) -> MegatronModel:
        megatron, seed = self._config.megatron, torch.initial_seed() % 2**31
        is_adapted = self._config.lora.rank > 0
        parallelism = Parallelism(megatron, timeout_s=self._config.collective_timeout_s, seed=seed)
        is_gpu = torch.cuda.is_available()
        if megatron.use_mbridge:
            from services.trainer.megatron.mbridge import Bridged

            bridged = Bridged.of(self._hf, self._config, self._dtype, is_gpu=is_gpu)
            config, self._map, make_chunk = bridged.config, bridged.weights, bridged.make_chunk
        else:
            config = settings.transformer_config(
                settings.layer_settings(self._hf), self._config, self._dtype, is_gpu=is_gpu
            )
            make_chunk = maker(ValueModel if self._role is Role.CRITIC else LogprobModel, config, self._hf)
        built = build_chunks(make_chunk, config, megatron, self._map.model, is_adapted=is_adapted, is_gpu=is_gpu)
        bare = [chunk.to(self.device) for chunk in built]
        parameters = local_parameters(bare, parallelism)
        if megatron.dist_checkpointing_path:
            load_converted_weights(bare, parallelism, megatron.dist_checkpointing_path)
        else:
            with same_on_all_ranks():
                load_checkpoint_weights(parameters, self._map, parallelism, self._model_path)
        if not self._role.is_frozen:
            if megatron.moe.freeze_router:
                for name, tensor in parameters.items():
                    tensor.requires_grad_(".router." not in name)
            if is_adapted:
                add_adapters(bare, self._map.model, self._config.lora, parallelism, seed=seed)
            chunks = wrap_chunks(bare, config, megatron)
        else:
            chunks = [half_precision(chunk.requires_grad_(False), config) for chunk in bare]
        return MegatronModel(chunks, config, parallelism)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        self.offloader.load(PARAMS, OPTIMIZER)
        self._finish_update()
        try:
            yield
        finally:
            self.offloader.offload(PARAMS, OPTIMIZER)

    def _finish_update(self) -> None:
        if not self._model.parallelism.has_replicas:  # this rank has updated all of its weights itself
            return
        for chunk in self._model.ddp_chunks():
            if chunk.ddp_config.overlap_param_gather:  # otherwise the next forward would gather the updated weights
                chunk.start_param_sync(force_sync=True)

    def _streamed(self, stream: Iterator[T]) -> Iterator[T]:
        self.offloader.load(PARAMS)
        self._finish_update()
        yield from stream
        self.offloader.offload(PARAMS)

    def _make_streams(self) -> None:
        """Makes the stream of the merged policy and, with LoRA, the streams of the base model and of the adapters."""
        chunks, parallelism = self._model.bare_chunks(), self._model.parallelism
        local = local_parameters(chunks, parallelism)
        parameters = {name: tensor for name, tensor in local.items() if self._map.is_published(name)}
        part_of, adapted = self._map.part, adapted_layers(chunks)
        self._stream = WeightStream(parameters, part_of, parallelism, self.device, adapted)
        if self._config.lora.rank:
            adapters = local_parameters(chunks, parallelism, adapters=True)
            self._base = WeightStream(parameters, part_of, parallelism, self.device)
            adapter_part_of = functools.partial(adapter_part, self._map)
            self._adapter = WeightStream(adapters, adapter_part_of, parallelism, self.device)

    def _collect(self, loss: LossFunction, factor: int) -> Collect:
        """Returns what the schedule calls with a micro-batch: the loss times `factor`, the rows, and what to keep."""

        def collect(shard: MicrobatchShard, outputs_KN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            value, metrics = loss(outputs_KN, shard.microbatch)
            rows = torch.full((), shard.num_rows, dtype=torch.int, device=self.device)  # a copy would wait for the GPU
            # The outputs are copied, because a view would keep all rows in memory, such as those of a teacher's tokens.
            return value * factor, rows, (outputs_KN[:2].detach().clone(), metrics)

        return collect

    def _count_rows(self, shards: Sequence[MicrobatchShard]) -> int:
        rows = torch.tensor([sum(shard.num_rows for shard in shards)], device=self.device)
        dist.all_reduce(rows, group=self._model.parallelism.dp_cp_group)
        return int(rows)

    def _sum_metrics(self, metrics: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Returns the sums over micro-batches and data-parallel ranks, on all pipeline stages."""
        parallelism = self._model.parallelism
        sums: dict[str, float] = {}
        if parallelism.is_last_stage:
            names = names_on_all_ranks(metrics, self.device, parallelism.dp_group)
            zero = metrics[0]["loss"].new_zeros(())
            totals = torch.stack([torch.stack([one.get(name, zero) for one in metrics]).sum() for name in names])
            sums = dict(zip(names, self.reduce(totals, dist.ReduceOp.SUM).tolist(), strict=True))
        if self._model.config.pipeline_model_parallel_size > 1:
            # Only the last stage has computed losses, and every rank must return the same metrics.
            sums = gather_json(sums, self.device, parallelism.pp_group)[-1]
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}

    def _gradient_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._model.ddp_chunks():
            buffers: Any = chunk.buffers  # Megatron's own list replaces Module.buffers
            yield from (buffer.grad_data for buffer in (*buffers, *chunk.expert_parallel_buffers))
