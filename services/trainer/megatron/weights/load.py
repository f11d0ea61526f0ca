"""Loads checkpoint weights into the sharded model."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from services.common.families.architecture import Architecture
from services.trainer.checkpoint.model_files import (
    opened,
    require_finite,
    require_known,
    require_same_if_tied,
    require_tensors,
    stored_tensors,
)
from services.trainer.megatron.parallel import Parallelism
from services.trainer.megatron.weights.stream import LocalTensor
from services.trainer.megatron.weights.weight_map import WeightMap


def load_checkpoint_weights(
    parameters: Sequence[LocalTensor], weight_map: WeightMap, parallelism: Parallelism, model_path: str
) -> None:
    """Copies only this rank's slices from the safetensors files of `model_path`, which `require_loadable` has checked.

    Raises:
        InvalidInput: A file is damaged, or a number is not finite.
    """
    stored = stored_tensors(Path(model_path))
    with contextlib.ExitStack() as stack:
        files = {tensor.file for tensor in stored.values()}
        tensors = {file: stack.enter_context(opened(file)) for file in files}
        for parameter in parameters:
            part = weight_map.part(parameter.name)
            slices = [tensors[stored[name].file].get_slice(name) for name in part.names]
            shard = part.cut(slices, *parallelism.shard_index(parameter.tensor, is_expert=part.is_expert))
            with torch.no_grad():
                parameter.tensor.copy_(shard)
    named = ((" and ".join(weight_map.part(one.name).names), one.tensor.detach()) for one in parameters)
    require_finite(named, model_path)


def require_loadable(model: Architecture, model_path: str, *, is_critic: bool) -> None:
    """Checks, before a model of that size is made, that the files have exactly its tensors.

    A critic needs no output layer.

    Raises:
        InvalidInput: A file is damaged, a tensor is missing, unknown or of another shape than config.json gives, or the
            output layer that config.json ties to the embedding is another.
    """
    directory = Path(model_path)
    stored = stored_tensors(directory)
    output, embedding = model.family.output.tensors[0], model.family.embedding.tensors[0]
    shapes = model.checkpoint_shapes()
    if is_critic:
        shapes.pop(output, None)
    require_tensors(stored, shapes, directory)
    if not is_critic:
        require_known(stored, {*shapes, output})
    if model.tie_word_embeddings:
        require_same_if_tied(stored, output, embedding)
