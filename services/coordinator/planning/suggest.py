"""What `lockstep plan --suggest` prints: the placements of a run that fit the GPUs, and the command for one.

Only keys that change no result are tried: the placement, the numbers of ranks and replicas, the engine's tensor
parallelism and the recomputation of activations. Placements whose KV cache holds the samples come first, then those
that share GPUs, which were as fast per GPU as dedicated ones (docs/one-gpu.md), then those with less tensor parallelism
in the engine. Only the memory is computed; speeds are not.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from services.common.config.load import is_override, load
from services.common.config.run import Config
from services.common.errors import InvalidInput, counted
from services.coordinator.clients.gpus import split_gpus
from services.coordinator.data.reading.hub import with_local_models
from services.coordinator.fleet.launch import Addresses, started_ranks
from services.coordinator.planning import memory
from services.coordinator.planning.plan import check_model, planned_model

_GIB = 2**30
# Contexts, CUDA graphs and libraries of both processes: 1.5 to 2.4 GiB were seen on an H100.
_BESIDE_BYTES = 3 * _GIB
# Share of the memory that is left for what `lockstep plan` does not count: buffers of collectives and fragmentation.
_UNCOUNTED = 0.1
# Share of the longest possible samples that the KV cache has to hold at once. An engine that has less room generates
# fewer samples at a time, or computes some again.
_ENOUGH = 0.5
_RECOMPUTE = "trainer.gradient_checkpointing=true"


@dataclass(frozen=True)
class Proposal:
    """A placement, and its memory on the fullest GPU."""

    overrides: Sequence[str]
    train_bytes: int
    cache_tokens: int
    """Tokens that the KV cache of one engine holds."""
    cached_share: float
    """Share of the samples generated at once, if all are of full length, whose tokens the KV cache holds."""
    fits: bool


@dataclass(frozen=True)
class Search:
    """The placements that fit, all that break no rule, and those that do, by the rule's message."""

    fitting: list[Proposal]
    legal: list[Proposal]
    refused: Mapping[str, str]

    def why_none(self, what: str) -> str:
        """Returns why no placement fits `what`: memory, rules of the config, or both."""
        message = f"no placement fits {what}"
        if self.legal:
            least = min(proposal.train_bytes for proposal in self.legal) / _GIB
            message += (
                f": training takes {least:.1f} GiB of each GPU or more, and the engine needs room for its weights and "
                "the samples of a prompt; set trainer.lora.rank, lower trainer.max_tokens_per_microbatch, or shard or "
                "offload the model with trainer.strategy=megatron (docs/megatron.md)"
            )
        refusals = "; ".join(f"{placement}: {why}" for why, placement in self.refused.items())
        return message + (f"; not possible, whatever the memory: {refusals}" if refusals else "")


def parse_gpus(text: str) -> list[int]:
    """Returns the bytes of each GPU of a text such as 8x79, which is 8 GPUs of 79 GiB.

    Raises:
        InvalidInput: It is something else.
    """
    count, _, gib = text.partition("x")
    if not (count.isdecimal() and gib.replace(".", "", 1).isdecimal() and int(count)):
        raise InvalidInput(f"--gpus {text}: give the number of GPUs and the GiB of each, such as 8x79", field="--gpus")
    return [int(float(gib) * _GIB)] * int(count)


def search(args: Sequence[str], gpus: Sequence[int]) -> Search:
    """Tries the placements of the config in `args`, the best first; `gpus` has the bytes of each GPU.

    Raises:
        NotFound: The model has no config.json on this host, or see `with_local_models`.
        InvalidInput: The config is invalid, or see `planned_model`.
        Unavailable: See `with_local_models`.
    """
    config = load(Config, [*args, "placement=disaggregated"])
    args = [*args, *_found_on_hub(config)]
    config = load(Config, [*args, "placement=disaggregated"])
    planned_model(config)
    own = started_ranks(config, Addresses())
    own_ranks = sum(own.values()) - own["trainer"]
    refused: dict[str, str] = {}
    legal: list[Proposal] = []
    for extra in ([], [_RECOMPUTE]):
        for sizes in _placements(len(gpus), own_ranks):
            try:
                legal.append(_proposal([*args, *sizes, *extra], [*sizes, *extra], gpus))
            except InvalidInput as error:
                refused.setdefault(error.message, " ".join(sizes))
        if fitting := [proposal for proposal in legal if proposal.fits]:
            # Above _ENOUGH more room counts for nothing; the sort keeps the order of _placements.
            return Search(sorted(fitting, key=lambda proposal: -min(proposal.cached_share, _ENOUGH)), legal, refused)
    if len(gpus) < (least := 2 + own_ranks):
        refused[f"it needs at least {least} GPUs"] = "placement=disaggregated"
    return Search([], legal, refused)


def show_suggestion(args: Sequence[str], gpus: Sequence[int], console: Console) -> None:
    """Prints the placements that fit, and the command for the first.

    Raises:
        InvalidInput: None fits, or see `search`.
    """
    if not gpus:
        raise InvalidInput("there is no GPU here; name those of another host, such as --gpus 8x79", field="--gpus")
    what = f"{counted(len(gpus), 'GPU')} of {min(gpus) / _GIB:.0f} GiB"
    tried = search(args, gpus)
    if not tried.fitting:
        raise InvalidInput(tried.why_none(what))
    table = Table(box=box.SIMPLE_HEAD, title=f"Placements that fit {what}", title_justify="left")
    for name in ("placement", "training GiB", "KV cache tokens", "room for samples"):
        table.add_column(name, justify="left" if name == "placement" else "right", overflow="fold")
    for proposal in tried.fitting:
        room = f"{min(proposal.cached_share, 1):.0%}"
        cells = f"{proposal.train_bytes / _GIB:.1f}", f"{proposal.cache_tokens:,}", room
        table.add_row(" ".join(proposal.overrides), *cells)
    console.print(table)
    console.print(
        "Room for samples: of those that an engine generates at once, the share that its KV cache holds if all are of "
        "full length.\n",
        highlight=False,
    )
    suggested = tried.fitting[0].overrides
    keys = {override.partition("=")[0] for override in suggested}
    kept = (arg for arg in args if not (is_override(arg) and arg.partition("=")[0] in keys))
    command = shlex.join(["lockstep", "run", *kept, *suggested])
    console.print("suggested:", highlight=False)
    console.print(f"  {command}", soft_wrap=True, highlight=False)


def _found_on_hub(config: Config) -> Iterator[str]:
    """Yields the overrides that name the directories of models on the Hub, so that each is looked up only once."""
    local = with_local_models(config, has_weights=False)
    if local.model != config.model:
        yield f"model={local.model}"
    for role, section in local.role_sections.items():
        if section.model != config.role_sections[role].model:
            yield f"{role}.model={section.model}"


def _placements(num_gpus: int, own_ranks: int) -> Iterator[list[str]]:
    """Yields the overrides of each placement, the best first; `own_ranks` GPUs are those of other models' trainers."""
    powers = [2**power for power in range(num_gpus.bit_length())]
    for size in powers:
        if num_gpus % size == 0:
            yield _overrides("colocated", num_gpus, num_gpus // size, size)
    left = num_gpus - own_ranks
    for num_ranks in sorted(powers, key=lambda ranks: abs(2 * ranks - left)):
        for size in powers:
            if num_ranks < left and (left - num_ranks) % size == 0:
                yield _overrides("disaggregated", num_ranks, (left - num_ranks) // size, size)


def _overrides(placement: str, num_ranks: int, num_replicas: int, size: int) -> list[str]:
    return [
        f"placement={placement}",
        f"trainer.num_ranks={num_ranks}",
        f"rollout.num_replicas={num_replicas}",
        f"rollout.tensor_parallel_size={size}",
    ]


def _proposal(args: Sequence[str], overrides: Sequence[str], gpus: Sequence[int]) -> Proposal:
    """Returns a placement, which fits if every phase does, and if the KV cache holds a whole prompt group."""
    config = load(Config, args)
    check_model(config)
    split_gpus(started_ranks(config, Addresses()), config, available=[""] * len(gpus), start_rollout=True)
    model, usable = planned_model(config), min(gpus) - _BESIDE_BYTES
    phases = memory.colocated_phases(config, model, memory.rank_memory(config, model, is_gpu=True).values())
    needed = {phase.name: phase.total for phase in phases}
    critic = memory.critic_memory(config, model, is_gpu=True)
    trained = max(needed["train"], critic.peak if critic else 0)  # a critic may have ranks of its own
    cache_bytes = memory.utilization(config) * min(gpus) - memory.engine_weights(config, model) - _BESIDE_BYTES
    tokens, rollout = int(cache_bytes // memory.cache_token_bytes(config, model)), config.rollout
    fits = (
        trained + (max(0, cache_bytes) if config.is_side_by_side else 0) <= usable * (1 - _UNCOUNTED)
        and (config.placement == "disaggregated" or needed["publish"] <= usable)
        and tokens >= rollout.completions_per_prompt * rollout.max_model_len
    )
    samples = config.data.prompts_per_step * rollout.completions_per_prompt
    at_once = min(rollout.max_samples, -(-samples // rollout.num_replicas))
    return Proposal(overrides, trained, tokens, tokens / (at_once * rollout.max_model_len), fits)
