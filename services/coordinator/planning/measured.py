"""Sizes of a model that the registry does not know, as the trainer's code builds it, without its weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from pydantic import TypeAdapter

from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.coordinator.fleet.probes import describe_model


@dataclass(frozen=True)
class MeasuredModel:
    """What `services.trainer.probe` says of a model. Lists count numbers (not bytes), in the order of a publication."""

    model_type: str
    layout: str
    """packed, or rows if the whole model computes padded samples."""
    attention: str
    """What computes attention."""
    num_parameters: int
    num_trained: int
    layer_sizes: tuple[int, ...]
    """Parameters of each layer."""
    layer_width: int
    """Numbers that the matrices of a layer read and write for one token, besides hidden states; a mean over layers."""
    widest: int
    """The most numbers that one matrix reads or writes for one token."""
    hidden_size: int
    vocab_size: int
    key_value_size: int
    """The most numbers of keys that a layer caches for one token."""
    num_key_value_heads: int
    """Of the layer with the most numbers of keys."""
    sizes: tuple[int, ...]
    """Of each tensor of the checkpoint."""
    adapter_sizes: tuple[int, ...]

    # As of an Architecture. Layers are counted by `layer_width`.
    num_experts = 0

    @property
    def num_layers(self) -> int:
        return len(self.layer_sizes)

    @property
    def end_parameters(self) -> int:
        """Parameters outside of the layers, with those of a vision tower."""
        return self.num_parameters - sum(self.layer_sizes)

    def tensor_sizes(self) -> Iterator[int]:
        return iter(self.sizes)


def measure(directory: str, trainer: TrainerConfig) -> MeasuredModel:
    """Returns the sizes of the model in a directory of this host, for strategy fsdp.

    Raises:
        InvalidInput: The trainer would refuse the model, or torch, with which it is built, is not installed here.
    """
    if find_spec("torch") is None:
        raise InvalidInput(
            f"the memory of {directory} cannot be estimated here: its type is not in the registry, and torch, with "
            "which its parameters are counted, is not installed",
            field="model",
        )
    return TypeAdapter(MeasuredModel).validate_python(describe_model(directory, trainer))
