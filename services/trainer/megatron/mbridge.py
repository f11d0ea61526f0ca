"""Builds models and converts their weights with mbridge, instead of the records of Lockstep's own families.

mbridge gives the fields of Megatron's config that depend on the model, builds the chunks, and maps, cuts and joins the
weights. Layer specs, groups, and the way of the weights between ranks, files and engines are those of every model. What
is wrong in mbridge is corrected in `services/trainer/compat/megatron/mbridge.py`, and `prove` compares each model that
is opened with transformers, because no list of corrections can be known to be complete.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from transformers import PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from services.common.config.megatron import MegatronConfig
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput, LockstepError
from services.common.families.architecture import Architecture
from services.trainer.checkpoint.ranks import same_on_all_ranks
from services.trainer.compat.megatron.mbridge import ModelBridge, make_bridge
from services.trainer.compat.megatron.state import NO_GROUPS, set_groups
from services.trainer.megatron.model import Chunk, LogprobModel, build_chunks
from services.trainer.megatron.role import MegatronModel, Parallelism
from services.trainer.megatron.settings import (
    latent_rope_settings,
    model_architecture,
    read_config,
    rope_settings,
    transformer_config,
)
from services.trainer.megatron.weights import Part, Sliceable, WeightMap, local_parameters
from services.trainer.proof import MOST_NATS, Reference, make_reference

_SEED = 0


class BridgeMap(WeightMap):
    """Maps the parameters of one model as mbridge does; only their order in a publication is Lockstep's."""

    def __init__(self, model: Architecture, bridge: ModelBridge):
        super().__init__(model)
        self._bridge = bridge

    def part(self, name: str) -> Part:
        return replace(
            super().part(name),
            names=self._bridge.tensor_names(name),
            cut=functools.partial(self._cut_by_bridge, name),
            join=functools.partial(self._bridge.join, name),
            # Without these, every weight that is sent goes through `join`.
            shapes=(),
            is_plain=False,
            views=None,
        )

    def _cut_by_bridge(self, name: str, tensors: Sequence[Sliceable], rank: int, size: int) -> torch.Tensor:
        return self._bridge.cut(name, [tensor[:] for tensor in tensors], rank, size)


@dataclass(frozen=True)
class Bridged:
    """A model as mbridge knows it, for the current parallel state."""

    config: TransformerConfig
    weights: BridgeMap
    bridge: ModelBridge

    @classmethod
    def of(cls, hf: PretrainedConfig, trainer: TrainerConfig, dtype: torch.dtype, *, is_gpu: bool) -> "Bridged":
        def make_config(**of_model: object) -> TransformerConfig:
            rope = latent_rope_settings(hf) if "kv_lora_rank" in of_model else {}
            return transformer_config({**of_model, **rope}, trainer, dtype, is_gpu=is_gpu)

        bridge = make_bridge(hf, make_config, rope_settings(hf), dtype)
        return cls(bridge.config, BridgeMap(model_architecture(hf), bridge), bridge)

    def make_chunk(self, spec: TransformerBlockSubmodules, ends: tuple[bool, bool], stage: int | None) -> Chunk:
        return LogprobModel.of(self.bridge.build(spec, ends, stage))


_proven: set[tuple[str, str]] = set()


def prove(hf: PretrainedConfig, trainer: TrainerConfig, device: torch.device, *, key: str) -> None:
    """Compares a small copy of a model, built and loaded by mbridge, with transformers on the same weights.

    All ranks call it, each of which computes the same, in float32 and with the layers that Megatron has on every
    device. `key` is the config section of the model, for errors.

    Raises:
        InvalidInput: Log-probabilities differ by more than MOST_NATS, mbridge fails, or it gives other weights back
            than it was given.
    """
    small = MegatronConfig(
        use_mbridge=True,
        moe=trainer.megatron.moe.model_copy(update={"token_dispatcher_type": "auto"}),
        transformer_config_kwargs=trainer.megatron.transformer_config_kwargs,
    )
    settings = trainer.model_copy(update={"megatron": small, "gradient_checkpointing": False})
    seen = hf.to_json_string(use_diff=False), small.model_dump_json()
    if seen in _proven:  # a trainer opens the same model for several roles, and again for each run
        return
    parallelism = Parallelism(small, timeout_s=trainer.collective_timeout_s, seed=_SEED)
    try:
        with same_on_all_ranks():
            if problem := _problem(hf, settings, parallelism, device):
                raise InvalidInput(
                    f"{key}.use_mbridge: with mbridge a small model of model_type {hf.model_type} {problem}; leave it "
                    "out, and Lockstep builds the model itself",
                    field=f"{key}.use_mbridge",
                )
    finally:
        set_groups(NO_GROUPS)
    _proven.add(seen)


def prove_alone(model_path: str, trainer: TrainerConfig) -> None:
    """Proves the model of a directory in a process that is no rank of a trainer."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        prove(read_config(model_path), trainer, torch.device("cpu"), key="trainer.megatron")
    finally:
        dist.destroy_process_group()


def _problem(hf: PretrainedConfig, settings: TrainerConfig, parallelism: Parallelism, device: torch.device) -> str:
    """Returns how the small copy differs, or an empty string."""
    reference = make_reference(hf)
    try:
        difference, lost = _compare(reference, settings, parallelism, device)
    except LockstepError as error:
        return f"is refused: {error.message}"
    except Exception as error:  # noqa: BLE001 mbridge may fail in any way on what it was not written for
        return f"fails: {error!r}"
    if not difference <= MOST_NATS:  # which NaN is not
        return f"has log-probabilities that differ from those of transformers by up to {difference:.2g} nats"
    return f"gives other weights back than it was given: {', '.join(lost[:5])}" if lost else ""


def _compare(
    reference: Reference, settings: TrainerConfig, parallelism: Parallelism, device: torch.device
) -> tuple[float, list[str]]:
    """Returns the largest difference of log-probabilities, in nats, and the tensors that are not given back bit by bit.

    The tensors go through the map as from a file, with the checkpoint's names.
    """
    bridged = Bridged.of(reference.model.config, settings, torch.float32, is_gpu=False)
    chunks = build_chunks(bridged.make_chunk, bridged.config, settings.megatron, bridged.weights.model)
    model = MegatronModel([chunk.to(device).requires_grad_(False) for chunk in chunks], bridged.config, parallelism)
    own = reference.model.state_dict()
    tied = reference.model.all_tied_weights_keys
    stored = revert_weight_conversion(reference.model, {name: own[name] for name in own.keys() - tied.keys()})
    given: dict[str, torch.Tensor] = {}
    try:
        for name, parameter in local_parameters(chunks, parallelism).items():
            part = bridged.weights.part(name)
            parameter.detach().copy_(part.cut(cast("list[Sliceable]", [stored[one] for one in part.names]), 0, 1))
            given |= zip(part.names, part.join([parameter.detach().cpu()]), strict=True)
        logprobs_N = model.forward([reference.packed().to(device)], temperature=1.0)[0][0].cpu()
    finally:
        model.close()
    both = stored.keys() & given.keys()
    lost = (stored.keys() ^ given.keys()) | {name for name in both if not torch.equal(stored[name], given[name])}
    return reference.difference(logprobs_N), sorted(lost)
