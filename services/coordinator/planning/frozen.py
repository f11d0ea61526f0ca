"""Estimates the memory of a run's frozen models, reference and teacher, which only compute log-probabilities."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.common.config.layout import layout_of
from services.common.config.load import AnyConfig, role_models, role_section
from services.common.config.trainer import TrainerConfig
from services.common.errors import counted
from services.common.families.architecture import read_architecture, read_content
from services.common.families.registry import FAMILIES
from services.coordinator.planning.activations import (
    MeasuredModel,
    Model,
    gathered_parameters,
    measure,
    microbatch_memory,
    stage_parameters,
    weight_bytes,
)

_NAMES = ("reference", "teacher")


@dataclass(frozen=True)
class FrozenModel:
    """Bytes of one frozen model on the rank that has most."""

    name: str
    num_parameters: int
    """Of the whole model."""
    num_ranks: int
    is_shared: bool
    """Whether it is on the policy's ranks."""
    weights: int
    """Bytes that stay on the device between forward passes."""
    forward: int
    """Bytes that a forward pass takes besides: intermediate results, and weights that were not there."""

    @property
    def line(self) -> str:
        weights, peak = (size / 2**30 for size in (self.weights, self.weights + self.forward))
        count, ranks = f"{self.num_parameters / 1e9:.3g}B parameters", counted(self.num_ranks, "rank")
        return (
            f"{self.name}: {count} on {ranks} of its own, on each {weights:.2f} GiB of weights, {peak:.2f} at its peak"
        )


def frozen_models(config: AnyConfig, policy: Model, *, is_gpu: bool) -> Iterator[FrozenModel]:
    """Yields the frozen models of a run; `policy` is the model of one that names no other.

    Raises:
        NotFound: A model that is named has no config.json on this host.
    """
    for name in _NAMES:
        if sized := sized_model(config, name, policy):
            yield _frozen(config, name, *sized, is_gpu=is_gpu)


def is_shared(config: AnyConfig, name: str) -> bool:
    """Returns whether the run has a model of a section, on the policy's ranks."""
    section = role_section(config, name)
    return section is not None and section.deployment == "shared"


def sized_model(config: AnyConfig, name: str, policy: Model) -> tuple[TrainerConfig, Model] | None:
    """Returns the settings and sizes of the model of a section, or None if the run has no such model; `policy` is the
    model of a section that names no other.

    Raises:
        NotFound: The model that is named has no config.json on this host.
    """
    for section, settings, directory in role_models(config):
        if section == name:
            return settings, policy if directory == Path(config.model) else read_model(directory, settings)
    return None


def read_model(directory: Path, settings: TrainerConfig) -> Model:
    """Returns the sizes of a model; those of one that the registry does not know are counted by the trainer's code.

    Raises:
        NotFound: There is no config.json in `directory`.
        InvalidInput: The trainer would refuse the model, or torch, which counts its parameters, is not installed here.
    """
    if read_content(directory).get("model_type") in FAMILIES or settings.strategy == "megatron":
        return read_architecture(directory)
    return measure(str(directory), settings)


def _frozen(config: AnyConfig, name: str, settings: TrainerConfig, model: Model, *, is_gpu: bool) -> FrozenModel:
    as_policy, weight = config.model_copy(update={"trainer": settings}), weight_bytes(settings, is_gpu=is_gpu)
    layout = layout_of(settings)
    if settings.strategy == "fsdp" or isinstance(model, MeasuredModel):
        weights = weight * -(-model.num_parameters // settings.num_ranks)
        besides = weight * gathered_parameters(settings, model)
        is_away = False
    else:
        besides = 0
        weights = weight * max(sum(stage_parameters(model, layout, pp)) for pp in range(layout.pp))
        is_away = "params" in settings.megatron.offloads
    results = (microbatch_memory(as_policy, model, layout, pp, is_gpu=is_gpu).forward for pp in range(layout.pp))
    here, back = (0, weights) if is_away else (weights, 0)
    return FrozenModel(
        name, model.num_parameters, settings.num_ranks, is_shared(config, name), here, max(results) + besides + back
    )
