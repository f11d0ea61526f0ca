"""Writes and reads sharded tensors in Megatron-Core's torch_dist format: torch's distributed checkpoint and two files.

The checkpoint contains only tensors. `common.pt`, where Megatron keeps everything else, is written empty because
Megatron's loader requires the file, and is never read here. `.metadata` is a pickle made by torch, which could run
code: it is read first with a list of the classes that it may name.
"""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from services.common.errors import InvalidInput
from services.common.files import writing
from services.trainer.checkpoint.ranks import ThreadedWriter, gather_json, typed_errors
from services.trainer.compat.megatron.state import torch_tensors
from services.trainer.compat.torch_checkpoint import read_metadata

# Nested dicts whose leaves are Megatron's sharded tensors, or factories that make them.
Sharded = dict[Any, Any]
_NUM_NAMED = 3
_MODEL_PARTS = ("embedding.", "decoder.", "output_layer.")


def stage(sharded: Sharded, *, copied: Collection[str] = ()) -> Mapping[str, object]:
    """Returns the tensors of `sharded` that this rank writes; parts in `copied` are copied to host memory.

    All ranks call it.
    """
    tensors, _ = save_preprocess({name: part for name, part in sharded.items() if part})
    assert isinstance(tensors, dict)  # because `sharded` is
    for name in copied:
        for shard in nested_values(tensors.get(name, {})):
            if is_main_replica(shard.replica_id):
                shard.data = shard.data.detach().to("cpu", copy=True)
    return torch_tensors(tensors)


def write(staged: Mapping[str, object], directory: Path, group: dist.ProcessGroup | None) -> None:
    """Writes the staged tensors. All ranks of `group` (None for all ranks) call it, and return when all are done.

    If a rank cannot write, every rank raises the error, except for the two files, which rank 0 writes.
    """
    # Torch's own writer: Megatron's forks processes, which outlive a trainer that is killed.
    writer = ThreadedWriter(directory, num_threads=2)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    with typed_errors(directory, done="written"):
        dcp.save(dict(staged), storage_writer=writer, planner=planner, process_group=group)
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as empty, writing(directory):
            # Beside the checkpoint, since a file that torch writes fails without the system's error.
            TorchCommonSaveStrategy("torch", 1).save_common({}, empty)
            (directory / COMMON_STATE_FNAME).write_bytes((Path(empty) / COMMON_STATE_FNAME).read_bytes())
            save_config(CheckpointingConfig("torch_dist"), str(directory))


def saved_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Returns the names of a checkpoint's tensors and their global shapes."""
    if not (directory / ".metadata").is_file():
        raise InvalidInput(f"path: {directory} is not a torch_dist checkpoint: it has no .metadata", field="path")
    metadata = read_metadata(directory)
    tensors = metadata.state_dict_metadata.items()
    return {key: tuple(saved.size) for key, saved in tensors if isinstance(saved, TensorStorageMetadata)}


def read(
    sharded: Sharded, directory: Path, *, later: Sharded | None = None, prefix: str = "", ignored: str = ""
) -> Sharded:
    """Loads the checkpoint's tensors into `sharded` in place, and returns its structure with the loaded tensors.

    All ranks call it. Nothing is overwritten unless the model tensors that all ranks together want are exactly those of
    the checkpoint, except `ignored`, and the tensors to load `later` exist too. The checkpoint's names have `prefix`.

    Raises:
        InvalidInput: A tensor is missing, unexpected or has another global shape. Every rank raises it.
        InternalError: A rank could not read. Every rank raises it, and some tensors may be overwritten.
    """
    _require({"now": sharded, "later": later or {}}, directory, prefix, ignored)
    return load(sharded, directory)


def load(sharded: Sharded, directory: Path) -> Sharded:
    """Does what `read` does, without its checks. Meta tensors are loaded into new host memory. All ranks call it."""
    tensors, others, factories = load_preprocess(sharded)
    dict_list_map_inplace(lambda shard: shard.without_data() if shard.data.is_meta else shard, tensors)
    with typed_errors(directory, done="read"):
        loaded = TorchDistLoadShardedStrategy().load(tensors, directory)
    merge(loaded, others)
    assert isinstance(factories, dict)  # because `sharded` is
    return apply_factory_merges(loaded, factories)


def _require(sharded: Sharded, directory: Path, prefix: str, ignored: str) -> None:
    tensors, _, _ = load_preprocess(sharded)
    shapes = saved_shapes(directory)
    own = {"wanted": [shard.key for shard in nested_values(tensors)], "problems": _problems(tensors, shapes)}
    ranks = gather_json(own, torch.device("cpu"))
    wanted = {key for rank in ranks for key in rank["wanted"]} | {prefix + ignored}
    model = tuple(prefix + part for part in _MODEL_PARTS)
    unwanted = [f"{key} is not in this model" for key in shapes if key.startswith(model) and key not in wanted]
    problems = sorted({problem for rank in ranks for problem in rank["problems"]}) + sorted(unwanted)
    if problems:
        more = f" and {len(problems) - _NUM_NAMED} more" if len(problems) > _NUM_NAMED else ""
        raise InvalidInput(
            f"path: {directory} does not hold this model: {'; '.join(problems[:_NUM_NAMED])}{more}; nothing was loaded",
            field="path",
        )


def _problems(tensors: Sharded, saved: Mapping[str, tuple[int, ...]]) -> list[str]:
    problems = []
    for shard in nested_values(tensors):
        shape = saved.get(shard.key)
        if shape is None:
            problems.append(f"no tensor {shard.key}")
            continue
        is_padded = shard.allow_shape_mismatch and shape[0] >= shard.global_shape[0]  # the vocabulary, by converters
        if shape != shard.global_shape and not (is_padded and shape[1:] == shard.global_shape[1:]):
            problems.append(f"{shard.key} is {list(shape)} there and {list(shard.global_shape)} here")
    return problems
