"""Runs micro-batches through one role's model in Megatron: its chunks and process groups."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer

from services.common.config.layout import Layout, gathers_tokens
from services.common.config.megatron import MegatronConfig
from services.trainer.compat.megatron.model import set_choice, take_apart
from services.trainer.compat.megatron.state import NO_GROUPS, current_groups, group_of, set_groups
from services.trainer.megatron.microbatch import Cut, MicrobatchShard, cut_microbatches, least_sizes
from services.trainer.megatron.model import Chunk, unwrap
from services.trainer.router_replay import LayerReplay, ModelReplay
from services.trainer.updates.packing import Microbatch


class Parallelism:
    """Makes the groups of `config` over all ranks. Megatron keeps them in globals, which the roles use in turn.

    Call `activate` before Megatron runs anything for the role.
    """

    def __init__(self, config: MegatronConfig, *, timeout_s: float, seed: int):
        self.config = config
        # Megatron refuses to make groups as long as it has others.
        set_groups(NO_GROUPS)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.etp,
            distributed_timeout_minutes=timeout_s / 60,  # pyright: ignore[reportArgumentType]  Megatron passes it to timedelta
        )
        self._state = current_groups()
        self._replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self._expert_replica = parallel_state.get_expert_data_parallel_rank()
        self.tp_group = group_of(parallel_state.get_tensor_model_parallel_group())
        self.cp_group = group_of(parallel_state.get_context_parallel_group())
        self.dp_group = group_of(parallel_state.get_data_parallel_group())
        self.dp_cp_group = group_of(parallel_state.get_data_parallel_group(with_context_parallel=True))
        self.pp_group = group_of(parallel_state.get_pipeline_model_parallel_group())
        self.ep_group = group_of(parallel_state.get_expert_model_parallel_group())
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        self.last_stage_rank = parallel_state.get_pipeline_model_parallel_last_rank()
        self.expert_rank = parallel_state.get_expert_model_parallel_rank()
        self.tp_index = parallel_state.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size
        etp_rank = parallel_state.get_expert_tensor_parallel_rank()
        assert etp_rank is not None  # initialize_model_parallel made its group
        self.etp_index = etp_rank, config.etp
        self.data_rank = parallel_state.get_data_parallel_rank()
        # Whether several ranks hold the same weights, so that each may update only a share of them.
        self.has_replicas = self.dp_cp_group.size() > 1 or parallel_state.get_expert_data_parallel_world_size() > 1
        # Each tensor-parallel rank draws its own dropout. Pipeline stages have different layers, so one seed is enough.
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def activate(self) -> None:
        set_groups(self._state)

    def shard_index(self, parameter: torch.Tensor, *, is_expert: bool) -> tuple[int, int]:
        """Returns the index and the number of tensor-parallel shards of `parameter`; (0, 1) if it is not cut."""
        if not getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, "partition_dim", -1) < 0:
            return 0, 1
        return self.etp_index if is_expert else self.tp_index

    def is_holder(self, parameter: torch.Tensor, *, is_expert: bool) -> bool:
        """Returns whether this rank is the holder of its shard: the first of all ranks that have the same shard."""
        replica = self._expert_replica if is_expert else self._replica
        is_cut = self.shard_index(parameter, is_expert=is_expert)[1] > 1
        return replica == 0 and (is_cut or (self.etp_index if is_expert else self.tp_index)[0] == 0)


# Takes a micro-batch and the outputs [K, N] at its predictions; returns a value for the schedule to collect.
Collect = Callable[[MicrobatchShard, torch.Tensor], object]


class MegatronModel:
    """The chunks of one model, wrapped or not, and their process groups."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig, parallelism: Parallelism):
        self.chunks, self.config, self.parallelism = list(chunks), config, parallelism
        self.replay: ModelReplay | None = None
        # With sequence parallelism, the tokens of a micro-batch are divided among so many ranks.
        num_ranks = parallelism.config.tensor_model_parallel_size * parallelism.config.context_parallel_size
        self._cut = Cut(
            cp_size=config.context_parallel_size,
            cp_rank=dist.get_rank(parallelism.cp_group),
            align=Layout.of(parallelism.config, dist.get_world_size()).align,
            is_packed=parallelism.config.packed_sequences,
            multiple=parallelism.config.rows_multiple * num_ranks,
        )
        self._gathers_tokens = config.num_moe_experts is not None and gathers_tokens(
            parallelism.config, config.moe_router_topk
        )

    def cut(self, microbatches: Sequence[Microbatch]) -> list[MicrobatchShard]:
        sizes = least_sizes(microbatches, self._cut)
        if self._gathers_tokens:  # so every rank must have the same number
            device = microbatches[0].tokens_T.device
            largest = torch.from_numpy(sizes).to(device)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.parallelism.ep_group)
            sizes = largest.cpu().numpy()
        if len(self.chunks) > 1:  # interleaved pipelines need one size
            sizes[:] = sizes.max(0)
        return cut_microbatches(microbatches, self._cut, sizes)

    def enable_router_replay(self) -> None:
        """Makes the layers of experts of this rank's chunks compute with the routed experts of micro-batches."""
        layers = {}
        for layer in (layer for chunk in self.bare_chunks() for layer in chunk.layers()):
            if isinstance(layer.mlp, MoELayer):
                replay = layers[layer.layer_number - 1] = LayerReplay()
                set_choice(layer, replay.choose)
        copies = 1 if self.config.sequence_parallel else self.parallelism.tp_index[1]
        self.replay = ModelReplay(layers, next(self.chunks[0].parameters()).device, copies)

    def forward(self, microbatches: Sequence[Microbatch], temperature: float) -> list[torch.Tensor]:
        """Returns the model's outputs [K, N] of each micro-batch, on all pipeline stages, without gradients."""
        shards = self.cut(microbatches)
        with torch.no_grad():
            outputs = self._run(shards, temperature, lambda shard, outputs_KN: outputs_KN, is_forward_only=True)
        return self.from_last_stage(outputs, microbatches)

    def accumulate(
        self, shards: Sequence[MicrobatchShard], temperature: float, collect: Collect, *, is_whole: bool
    ) -> list[Any]:
        """Runs forward and backward of all micro-batches in Megatron's schedule.

        `collect` returns the loss, the number of tokens by which the gradient of a whole update will be divided, and a
        value to return. Otherwise no number divides it, and each rank adds to its own gradients, which
        `complete_blocks` sums. Returns these values on the last pipeline stage, and an empty list elsewhere.
        """
        with contextlib.nullcontext() if is_whole else self._without_reduction():
            return self._run(shards, temperature, collect, is_forward_only=False)

    @contextlib.contextmanager
    def _without_reduction(self) -> Iterator[None]:
        saved = self.config.finalize_model_grads_func, self.config.no_sync_func
        with contextlib.ExitStack() as stack:
            for chunk in self.ddp_chunks():
                stack.enter_context(chunk.no_sync())  # the schedule's own lets the last micro-batch be reduced
            self.config.finalize_model_grads_func = self.config.no_sync_func = None
            try:
                yield
            finally:
                self.config.finalize_model_grads_func, self.config.no_sync_func = saved

    def complete_blocks(self, factor: float) -> None:
        """Sums the gradients of all blocks over the ranks, and multiplies them by `factor`."""
        self.parallelism.activate()
        for chunk in self.ddp_chunks():
            if chunk.ddp_config.overlap_grad_reduce:  # otherwise finalize_model_grads starts the sum itself
                chunk.start_grad_sync()
        finalize_model_grads(self.chunks)
        for chunk in self.ddp_chunks():
            chunk.scale_gradients(factor)

    def from_last_stage(self, values: Sequence[torch.Tensor], microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """Returns `values`, [K, N] of each micro-batch, which only the last pipeline stage has, on all stages."""
        counts = [microbatch.targets_N.numel() for microbatch in microbatches]
        if self.parallelism.is_last_stage:
            whole = torch.cat(list(values), 1)
        else:
            num_outputs = unwrap(self.chunks[0]).num_outputs + microbatches[0].top_k.num_rows
            whole = torch.empty(num_outputs, sum(counts), device=microbatches[0].targets_N.device)
        if self.config.pipeline_model_parallel_size > 1:
            dist.broadcast(whole, src=self.parallelism.last_stage_rank, group=self.parallelism.pp_group)
        return list(whole.split(counts, 1))

    def _run(
        self, shards: Sequence[MicrobatchShard], temperature: float, collect: Collect, *, is_forward_only: bool
    ) -> list[Any]:
        self.parallelism.activate()
        for chunk in self.chunks:
            # Megatron recomputes activations in training mode only. Dropout is that of adapters; the models' own is 0
            # (settings.py).
            chunk.train(not is_forward_only)
        tokens = shards[0].tokens
        # Each chunk of an interleaved pipeline reads all micro-batches.
        iterators = [iter(shards) for _ in self.chunks]

        def step(
            shards: Iterator[MicrobatchShard], chunk: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[..., object]]:
            shard = next(shards)
            self._feed(shard)

            def on_last_stage(output_KM: torch.Tensor, non_loss_data: bool = False) -> object:
                return collect(shard, shard.whole(output_KM, self.parallelism.cp_group))

            return chunk(shard, temperature), on_last_stage

        with self.replay.passes() if self.replay else contextlib.nullcontext():
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(shards),
                # Of whole sequences: Megatron divides it by the context-parallel size (schedules.py,
                # get_tensor_shapes).
                seq_length=tokens.size(1) * self.config.context_parallel_size,
                micro_batch_size=tokens.size(0),
                forward_only=is_forward_only,
                collect_non_loss_data=is_forward_only,
            )

    def _feed(self, shard: MicrobatchShard) -> None:
        """Sets the routed experts that the next forward pass uses, if they are replayed: those of `shard`, if any."""
        if self.replay is None:
            return
        rows_RLK = None
        if shard.routed_experts is not None:
            rows_SBLK = shard.routed_experts.transpose(0, 1)  # a router's rows are tokens before sequences
            if self.config.sequence_parallel:
                rank, size = self.parallelism.tp_index
                rows_SBLK = rows_SBLK.chunk(size)[rank]
            rows_RLK = rows_SBLK.flatten(0, 1)
        self.replay.feed(rows_RLK)

    def close(self) -> None:
        """Frees the memory of the chunks and their references to process groups."""
        self.config.grad_scale_func = self.config.no_sync_func = None
        take_apart(self.chunks)
        self.chunks.clear()

    def bare_chunks(self) -> list[Chunk]:
        return [unwrap(chunk) for chunk in self.chunks]

    def ddp_chunks(self) -> list[DistributedDataParallel]:
        """Returns the wrapped chunks of a trained model, or none for a frozen model, which has no gradients."""
        return [chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)]
