"""Saves and loads a trained model and its optimizer; the parallel sizes may differ between saving and loading.

Besides Megatron's files a checkpoint has layout.json: the layout that it was saved under, and the number of optimizer
updates. The learning rate needs no state, since it follows from the policy's version. With LoRA, only the adapters and
their optimizer state are saved. Random number generators are restored if the ranks' layout is the same; otherwise they
keep their state, which OpenRun has just seeded.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer

from services.common.config.trainer import TrainerConfig
from services.common.errors import DataLoss, InvalidInput, LockstepError, PreconditionFailed
from services.common.files import writing
from services.trainer.adapters import is_adapter
from services.trainer.backend import Role
from services.trainer.checkpoint import manifest as checkpoint
from services.trainer.checkpoint.ranks import gather_json, same_on_all_ranks
from services.trainer.compat.megatron.state import group_of, rng_tracker
from services.trainer.megatron import optimizer as optimizers
from services.trainer.megatron.model import Chunk, ValueModel
from services.trainer.megatron.role import MegatronModel, Parallelism
from services.trainer.megatron.torch_dist import Sharded, read, saved_shapes, stage, write
from services.trainer.megatron.weights import HEAD

_LAYOUT = "layout.json"
_FIELD = "trainer.megatron.dist_checkpointing_path"
# Prefixes that converters add to the names of a model's tensors.
_PREFIXES = ("", "model.", "module.")


@dataclass(frozen=True)
class SavedUnder:
    """The run that saved a checkpoint. `sizes` maps names to parallel sizes."""

    model_type: str
    lora_rank: int
    resharding: optimizers.Resharding
    device: str
    num_ranks: int
    sizes: dict[str, int]
    role: str = Role.POLICY

    @classmethod
    def of(cls, config: TrainerConfig, role: Role, model_type: str, device: torch.device) -> "SavedUnder":
        megatron = config.megatron
        is_by_bucket = megatron.use_distributed_optimizer and not megatron.fully_reshardable
        return cls(
            model_type=model_type,
            lora_rank=config.lora.rank,
            resharding="dp_reshardable" if is_by_bucket else "fully_reshardable",
            device=device.type,
            num_ranks=dist.get_world_size(),
            sizes={
                "TP": megatron.tensor_model_parallel_size,
                "PP": megatron.pipeline_model_parallel_size,
                "VPP": megatron.virtual_pipeline_model_parallel_size or 1,
                "CP": megatron.context_parallel_size,
                "EP": megatron.expert_model_parallel_size,
                "ETP": megatron.etp,
            },
            role=role,
        )

    def __str__(self) -> str:
        sizes = " ".join(f"{name}{size}" for name, size in self.sizes.items())
        adapters = f", adapters of rank {self.lora_rank}" if self.lora_rank else ""
        return f"a {self.role}, {self.model_type}{adapters} on {self.num_ranks} ranks of {sizes} ({self.resharding})"

    def require_loadable(self, own: "SavedUnder") -> None:
        """Raises PreconditionFailed if a run with layout `own` cannot load a checkpoint of this one."""
        hint = ""
        if self.role != own.role:
            hint = "each role has its own checkpoints"
        elif (self.model_type, self.lora_rank) != (own.model_type, own.lora_rank):
            hint = "use the same model and lora.rank"
        elif self.resharding == "dp_reshardable" and (self.sizes != own.sizes or own.resharding != self.resharding):
            hint = "a dp_reshardable checkpoint loads only if nothing but DP differs; save a fully_reshardable one"
        if hint:
            raise PreconditionFailed(f"the checkpoint was saved by {self}, but this run is {own}: {hint}")


class Checkpointer:
    """Saves and loads one model with its optimizer. All ranks call each method, in the same order."""

    def __init__(self, model: MegatronModel, optimizer: MegatronOptimizer, config: TrainerConfig, own: SavedUnder):
        self._model, self._optimizer, self._own = model, optimizer, own
        # A background thread writes with its own group, so that its collectives do not mix with those of training.
        timeout = timedelta(seconds=config.collective_timeout_s)
        is_async = config.megatron.async_save
        self._writers = group_of(dist.new_group(backend="gloo", timeout=timeout)) if is_async else None

    def begin_save(self, directory: Path, *, is_copied: bool) -> Callable[[], None]:
        """Returns a function that writes the state into `directory`; if it is a copy, also from another thread."""
        self._model.parallelism.activate()
        alive = ["model"] if optimizers.is_gathered(self._optimizer, self._own.resharding) else ["model", "optimizer"]
        sharded = self._sharded(self._own.resharding, self._all_tensors(), is_loading=False)
        staged = stage(sharded, copied=alive if is_copied else ())
        # The optimizer of a pipeline stage without adapters counts no updates, so take the maximum.
        number = max(gather_json(optimizers.num_updates(self._optimizer), torch.device("cpu")))

        def write_all() -> None:
            write(staged, directory, self._writers)
            if dist.get_rank() == 0:
                content = {"layout": asdict(self._own), "num_updates": number}
                with writing(directory):
                    (directory / _LAYOUT).write_text(json.dumps(content, indent=1))

        return write_all

    def load(self, directory: Path) -> None:
        """Loads a checkpoint that was saved under any layout.

        Raises:
            PreconditionFailed: It cannot be loaded under this run's layout. Nothing is changed.
            InvalidInput: Its tensors do not match this model's. Nothing is changed.
        """
        saved, number = _read_layout(directory)
        saved.require_loadable(self._own)
        self._model.parallelism.activate()
        sharded = self._sharded(saved.resharding, self._all_tensors(), is_loading=True)
        own = self._own
        if (saved.device, saved.num_ranks, saved.sizes) != (own.device, own.num_ranks, own.sizes):
            del sharded["rng"]
        is_by_parameter = saved.resharding == "fully_reshardable"
        pieces = optimizers.shard_pieces(self._optimizer, self._all_tensors()) if is_by_parameter else []
        targets = _tensors(sharded["model"])
        loaded = read(sharded, directory, later={index: piece.wanted for index, piece in enumerate(pieces)})
        _copy_into(targets, loaded.get("model", {}))
        optimizers.set_state(self._optimizer, loaded.get("optimizer", {}), self._all_tensors())
        optimizers.load_pieces(pieces, directory)
        optimizers.set_num_updates(self._optimizer, number)
        if "rng" in loaded:
            _set_generators(loaded["rng"])

    def _sharded(self, resharding: optimizers.Resharding, model: Sharded, *, is_loading: bool) -> Sharded:
        state = optimizers.sharded_state(self._optimizer, model, resharding, is_loading=is_loading)
        if self._own.lora_rank:
            model = {name: shard for name, shard in model.items() if is_adapter(name)}
        return {"model": model, "optimizer": state, "rng": _generators()}

    def _all_tensors(self) -> Sharded:
        return model_tensors(self._model.bare_chunks(), self._model.parallelism)


def model_tensors(chunks: Sequence[Chunk], parallelism: Parallelism, *, has_layers_apart: bool = True) -> Sharded:
    """Returns parameters and buffers of this rank's chunks; with `has_layers_apart` each layer has its own tensors."""
    metadata = {"non_homogeneous_layers": has_layers_apart, "dp_cp_group": parallelism.dp_cp_group}
    return {
        f"{index}.{name}": shard
        for index, chunk in enumerate(chunks)
        for name, shard in chunk.sharded_state_dict(metadata=metadata).items()
        # Objects are TransformerEngine's FP8 scaling state, which starts anew.
        if isinstance(shard, (ShardedTensor, ShardedTensorFactory))
    }


def load_converted_weights(chunks: Sequence[Chunk], parallelism: Parallelism, path: str) -> None:
    """Loads the model from a torch_dist checkpoint: a converted one, or the `state` of a Lockstep checkpoint.

    Adapters and a critic's head keep their values. Any other difference between the checkpoint's tensors and this
    model's is InvalidInput.
    """
    directory = Path(path)
    with same_on_all_ranks():
        if dist.get_rank() == 0 and (directory.parent / "manifest.json").is_file():
            try:
                checkpoint.verify(directory.parent)
            except LockstepError as error:
                raise InvalidInput(f"{_FIELD}: {error.message}", field=_FIELD) from error
    try:
        names = saved_shapes(directory)
        is_apart = any(re.search(r"(^|\.)decoder\.layers\.\d+\.", name) for name in names)
        sharded = model_tensors(chunks, parallelism, has_layers_apart=is_apart)
        is_critic = isinstance(chunks[0], ValueModel)
        sharded = {
            name: shard
            for name, shard in sharded.items()
            if not is_adapter(name) and not (is_critic and name.endswith(HEAD))
        }
        prefix = next((p for p in _PREFIXES if any(name.startswith(f"{p}decoder.") for name in names)), "")
        add_prefix_for_sharding(sharded, prefix)
        targets = _tensors(sharded)
        _copy_into(targets, read(sharded, directory, prefix=prefix, ignored=HEAD if is_critic else ""))
    except InvalidInput as error:
        raise InvalidInput(f"{_FIELD}: {error.message}", field=_FIELD) from error


def _tensors(sharded: Sharded) -> dict[str, torch.Tensor]:
    return {name: shard.data for name, shard in sharded.items()}


@torch.no_grad()
def _copy_into(targets: dict[str, torch.Tensor], loaded: Sharded) -> None:
    for name, tensor in targets.items():
        tensor.copy_(loaded[name])


def _generators() -> Sharded:
    states: dict[str, torch.Tensor] = {"cpu": torch.get_rng_state(), **rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    place = (0, dist.get_rank(), dist.get_world_size())
    return {
        name: ShardedTensor.from_rank_offsets(f"rng.{name}", state.clone()[None], place)
        for name, state in states.items()
    }


def _set_generators(loaded: Sharded) -> None:
    states = {name: state[0] for name, state in loaded.items()}
    torch.set_rng_state(states.pop("cpu"))
    if "cuda" in states:
        torch.cuda.set_rng_state(states.pop("cuda"))
    rng_tracker().set_states(states)


def _read_layout(directory: Path) -> tuple[SavedUnder, int]:
    file = directory / _LAYOUT
    if not file.is_file():
        raise PreconditionFailed(f"{directory} was not written by strategy megatron: it has no {_LAYOUT}")
    try:
        content = json.loads(file.read_text())
        return SavedUnder(**content["layout"]), int(content["num_updates"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataLoss(f"{file} is damaged: {error}") from error
