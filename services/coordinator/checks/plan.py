"""`lockstep plan`: shows the trainer's layout and memory, computed only from the config and the model's config.json."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from services.common.config.any import AnyConfig
from services.common.config.run import Config
from services.common.config.streaming import groups_per_block, streams
from services.common.config.trainer.section import TrainerConfig
from services.common.families.architecture import Architecture, read_architecture, read_content
from services.common.families.supported import require_supported
from services.common.megatron.layout import Coordinates, Layout, check_layout, data_parallel_size, rank_map
from services.coordinator.checks.memory import Memory, StateBytes, publication, rank_memory, weight_bytes
from services.coordinator.checks.memory_colocated import Phase, colocated_phases, host_bytes, utilization
from services.coordinator.checks.plan_environment import environment_plan

_GPUS_PER_HOST = 8
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


def check_model(config: AnyConfig) -> None:
    """Checks the model as the trainer will, and the layouts of strategy megatron, if the model is on this host.

    Raises:
        InvalidInput: A strategy does not support the model, or a layout breaks a rule.
    """
    if not (Path(config.model) / "config.json").is_file():
        return
    _check_supported(config)
    if any(_layouts(config)):
        _check(config, read_architecture(config.model))


def show_plan(config: Config, console: Console) -> None:
    """Prints the plan of `config`.

    Raises:
        NotFound: The model has no config.json on this host.
        InvalidInput: See `check_model`.
    """
    model = read_architecture(config.model)
    _check_supported(config)
    _check(config, model)
    lines = [f"{model.model_type}: {model.num_layers} layers, {_count(model.num_parameters)} parameters"]
    for name, settings in _layouts(config):
        layout = Layout.of(settings.megatron, settings.num_ranks)
        lines.append(f"{name}: {_sizes(layout)}")
        if model.num_experts:
            lines.append(f"  experts: ETP {layout.etp} x EP {layout.ep} x PP {layout.pp} x {layout.edp} copies")
    _print_lines(console, lines)
    if config.trainer.strategy == "megatron":
        console.print(_rank_table(Layout.of(config.trainer.megatron, config.trainer.num_ranks), model))
    ranks = rank_memory(config, model)
    console.print(_memory_table(list(ranks), list(ranks.values())))
    batch = (_batch(config), *_blocks(config), *_lag(config))
    _print_lines(console, [_offloaded(config), _publication(config, model), *batch])
    if config.placement == "colocated":
        phases = colocated_phases(config, model, list(ranks.values()))
        console.print(_phase_table(phases))
        _print_lines(console, [_shared(config, host_bytes(list(ranks.values())))])
    _print_lines(console, [*environment_plan(config), _assumptions(config)])


def _layouts(config: AnyConfig) -> Iterator[tuple[str, TrainerConfig]]:
    return ((name, model) for name, model in config.models.items() if model.strategy == "megatron")


def _check_supported(config: AnyConfig) -> None:
    content = read_content(config.model)
    for strategy in dict.fromkeys(model.strategy for model in config.models.values()):
        require_supported(content, strategy, f"{config.model}/config.json")


def _check(config: AnyConfig, model: Architecture) -> None:
    for name, settings in _layouts(config):
        check_layout(settings.megatron, settings.num_ranks, architecture=model, key=f"{name}.megatron")


def _rank_table(layout: Layout, model: Architecture) -> Table:
    columns = ("rank", "gpu", "tp", "cp", "dp", "pp", "ep", "etp", "layers", "experts")
    table = _table(*columns, title=f"Ranks, on hosts of {_GPUS_PER_HOST} GPUs")
    for at in rank_map(layout):
        places = (at.rank, at.rank % _GPUS_PER_HOST, at.tp, at.cp, at.dp, at.pp, at.ep, at.etp)
        table.add_row(*map(str, places), *_holds(layout, model, at))
    return table


def _holds(layout: Layout, model: Architecture, at: Coordinates) -> tuple[str, str]:
    layers = ", ".join(map(_range, layout.layers(model.num_layers, at.pp)))
    return layers, _range(layout.experts(model.num_experts, at.ep)) if model.num_experts else "-"


def _memory_table(names: Sequence[str], memories: Sequence[Memory]) -> Table:
    unit, size = _unit(max(memory.peak for memory in memories))
    has_activations, has_reference = any(m.activations for m in memories), any(m.reference for m in memories)
    columns = ["ranks", "params", "weights", "grads", "optimizer"]
    columns += ["activations"] * has_activations + ["ref"] * has_reference + ["peak", "idle"]
    table = _table(*columns, title=f"Memory per rank in {unit}")
    for name, memory in zip(names, memories, strict=True):
        cells = [f"{part / size:.2f}" for part in (memory.weights, memory.gradients, memory.optimizer)]
        if has_activations:
            cells.append(f"{memory.activations / size:.2f} x{memory.in_flight:g}")
        if has_reference:
            cells.append(f"{memory.reference / size:.2f}")
        cells += [f"{memory.peak / size:.2f}", f"{memory.idle / size:.2f}"]
        table.add_row(name, _count(memory.parameters), *cells)
    return table


def _phase_table(phases: Sequence[Phase]) -> Table:
    unit, size = _unit(max(phase.total for phase in phases))
    table = _table("phase", "trainer", "engine", "both", title=f"Memory of a shared GPU in {unit}")
    for phase in phases:
        table.add_row(phase.name, *(f"{part / size:.2f}" for part in (phase.trainer, phase.engine, phase.total)))
    return table


def _shared(config: Config, pinned_bytes: int) -> str:
    unit, size = _unit(pinned_bytes)
    return (
        f"generate: the KV cache takes the engine to {utilization(config):.0%} of the GPU. publish: two buffers are "
        f"counted with the trainer. Pinned host memory: {pinned_bytes / size:.2f} {unit} for each of "
        f"{config.trainer.num_ranks} ranks. Not counted: contexts and CUDA graphs of both processes."
    )


def _offloaded(config: Config) -> str:
    trainer = config.trainer
    if trainer.strategy == "megatron":
        names = sorted(trainer.megatron.offloads)
    else:
        names = ["grads", "optimizer", "params"] if trainer.fsdp.cpu_offload else []
    return f"offloaded to host memory between phases (idle): {', '.join(names) or 'nothing'}"


def _publication(config: Config, model: Architecture) -> str:
    num_bytes, buckets = publication(config, model)
    unit, size = _unit(num_bytes)
    rank = config.trainer.lora.published_rank
    what = f"adapters of rank {rank}" if rank else "whole checkpoint"
    layout = Layout.of(config.trainer.megatron, config.trainer.num_ranks)
    # A slot can end before its bucket is full, so there can be more buckets if several ranks send.
    least = "" if rank or layout.tp * layout.pp * layout.ep == 1 else "at least "
    return f"publication: {num_bytes / size:.2f} {unit} ({num_bytes} bytes, {what}), buckets: {least}{buckets}"


def _batch(config: Config) -> str:
    groups = config.data.prompts_per_step // config.trainer.num_minibatches
    samples, ranks = groups * config.rollout.completions_per_prompt, data_parallel_size(config.trainer)
    each = f"{samples // ranks}" + (f" or {samples // ranks + 1}" if samples % ranks else "")
    return f"batch: {samples} samples per mini-batch, {each} on each of {ranks} data-parallel ranks"


def _blocks(config: Config) -> Iterator[str]:
    size, trainer = groups_per_block(config), config.trainer
    if not size:
        return
    when = "as soon as they are scored" if streams(config) else "when the batch is complete"
    idle = ""
    if trainer.strategy == "megatron" and trainer.megatron.pipeline_model_parallel_size > 1:
        layout = Layout.of(trainer.megatron, trainer.num_ranks)
        longest = config.data.max_prompt_tokens + config.max_response_tokens
        num_tokens = size * config.rollout.completions_per_prompt * longest
        num_packs = max(layout.pp, num_tokens // (trainer.max_tokens_per_microbatch * layout.dp))
        share = (layout.pp - 1) / (layout.vpp * num_packs + layout.pp - 1)
        idle = f"; the pipeline idles for {share:.0%} of each, more if samples are shorter than they may be"
    yield f"blocks: {-(-config.data.prompts_per_step // size)} of {size} groups, trained on {when}{idle}"


def _lag(config: Config) -> Iterator[str]:
    if lag := config.trainer.lag.versions:
        yield f"lag: the batch that updates version t is generated by version t - {lag}, during earlier updates"


def _assumptions(config: Config) -> str:
    trainer = config.trainer
    if trainer.strategy == "fsdp":
        whole = "" if trainer.fsdp.reduce_each_microbatch else ", whole on each rank until the last micro-batch"
        return (
            f"Bytes per parameter: float32 weights 4, grads 4{whole}, Adam moments 8. Not counted: activations, "
            "logits, the gathered layer."
        )
    held = weight_bytes(trainer)
    of_weights = "bf16 weights 2" if held == 2 else "float32 weights 4"
    state = StateBytes.of(trainer)
    optimizer = (f"master {state.master} + " if state.master else "") + f"Adam moments {state.moments}"
    if state.device_share < 1:
        optimizer += f" of {state.device_share:.0%} of them, the rest in host memory"
    if trainer.gradient_checkpointing and trainer.megatron.recompute_granularity == "full":
        activations = "layer inputs (full recompute)"
    else:
        activations = "Korthikanti et al. 2022, arXiv 2205.05198, flash attention, this model's widths"
    return (
        f"Bytes per parameter: {of_weights}, grads {state.gradient}, optimizer: {optimizer}. Activations: one "
        f"micro-batch of {trainer.max_tokens_per_microbatch} tokens x those in flight, {activations}. Not counted: "
        "logits, buffers of collectives and kernels."
    )


def _sizes(layout: Layout) -> str:
    chunks = f", VPP {layout.vpp}" if layout.vpp > 1 else ""
    return f"{layout.world} ranks = TP {layout.tp} x PP {layout.pp} x CP {layout.cp} x DP {layout.dp}{chunks}"


def _table(*columns: str, title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _range(numbers: range) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


def _unit(num_bytes: int) -> tuple[str, int]:
    return next((unit for unit in _UNITS if num_bytes >= unit[1]), _UNITS[-1])


def _count(number: int) -> str:
    for letter, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return str(number)
