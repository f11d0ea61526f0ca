"""Makes Megatron's process groups of one role. Megatron keeps them in globals, which the roles use in turn."""

import torch
from megatron.core import parallel_state, tensor_parallel

from services.common.config.megatron import MegatronConfig
from services.trainer.compat.megatron.state import NO_GROUPS, current_groups, group_of, set_groups


class Parallelism:
    """Makes the groups of `config` over all ranks. Call `activate` before Megatron runs anything for the role."""

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
