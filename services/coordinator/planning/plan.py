"""What `lockstep plan` prints: the trainer's layout and memory, from the config and the model's config.json."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from services.common.config import streaming
from services.common.config.environment import EnvironmentConfig
from services.common.config.layout import Layout, check_layout, data_parallel_size, layout_of, nearest, rank_map
from services.common.config.load import AnyConfig, role_models
from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput, Reason, counted
from services.common.families.architecture import Architecture, read_architecture, read_content
from services.common.families.supported import require_supported, text_of
from services.coordinator.planning.activations import MeasuredModel, Model, microbatch_tokens, weight_bytes
from services.coordinator.planning.frozen import frozen_models, is_shared, read_model
from services.coordinator.planning.memory import (
    Memory,
    StateBytes,
    colocated_phases,
    critic_memory,
    host_bytes,
    publication,
    rank_memory,
    utilization,
)

_GPUS_PER_HOST = 8
_MEASURED = (
    "This type of model is not in the registry. Parameters are those that the trainer's code has counted; activations "
    "are the results of the matrices, without scores of attention that no kernel computes, states of recurrent layers "
    "and their padding."
)
_ROWS = " All layers compute padded samples, which count in a micro-batch with their padding."
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


def environment_plan(config: Config) -> list[str]:
    """Returns the lines of `lockstep plan` about the environment; none if there is no environment."""
    environment = config.environment
    if environment is None:
        return []
    if environment.kind == "agent":
        return [
            f"environment agent: up to {environment.max_calls} calls and {environment.max_tokens} sampled tokens in an "
            f"episode, which becomes up to {environment.max_segments} rows of {config.rollout.max_model_len} tokens",
            f"  each reward service plays {environment.max_concurrent} episodes at once",
        ]
    turn, response = config.rollout.sampling.max_tokens, config.max_response_tokens
    prompt, turns = config.data.max_prompt_tokens, environment.max_turns * turn
    messages = "any length (environment.max_message_tokens is not set)"
    if environment.max_message_tokens:
        messages = f"up to {environment.max_message_tokens} tokens each"
    lines = [
        f"environment {environment.kind}: up to {environment.max_turns} turns of up to {turn} tokens "
        f"({turns} together), and messages of {messages}",
        f"  an episode: {response} tokens after a prompt of up to {prompt}, together {prompt + response} of "
        f"rollout.max_model_len {config.rollout.max_model_len}, and of max_tokens_per_microbatch "
        + ", ".join(f"{model.max_tokens_per_microbatch} ({name})" for name, model in config.models.items()),
        "  a prompt counts with the schemas of its tools and the environment's first messages",
    ]
    if turns > response:
        key = "environment.max_tokens" if environment.max_tokens else "rollout.max_model_len"
        lines.append(
            f"  episodes with long turns end before turn {environment.max_turns}, with finish_reason length: {turns} "
            f"tokens of turns do not fit {response} (raise {key})"
        )
    prompts = config.selection.over_sampling.at_once(config.data.prompts_per_step)
    episodes = prompts * config.rollout.completions_per_prompt
    lines.append(f"  {episodes} episodes open at once; each reward service runs {_processes(environment)}")
    return lines


def _processes(environment: EnvironmentConfig) -> str:
    if environment.kind == "openenv":
        return f"no process, and has up to {environment.max_concurrent} connections"
    workers = f"{environment.num_workers} worker processes of up to {environment.max_memory_gib:g} GiB"
    if environment.kind != "tools":
        return workers
    parts = [workers] if any(tool.kind == "function" for tool in environment.tools) else []
    parts += [f"up to {tool.max_concurrent} sandboxes" for tool in environment.tools if tool.kind == "python"]
    parts += [f"an index of {tool.corpus} in memory" for tool in environment.tools if tool.kind == "search"]
    parts += [f"the MCP server {tool.place}" for tool in environment.tools if tool.kind == "mcp" and tool.command]
    return ", ".join(parts) or "no process"


def check_model(config: AnyConfig) -> None:
    """Checks the models as the trainer and the engine will, and the layouts of strategy megatron, of those that are on
    this host.

    Raises:
        InvalidInput: A strategy does not support the model, a layout breaks a rule, or the engine cannot cut its heads.
    """
    for name, settings, directory in role_models(config):
        if (directory / "config.json").is_file():
            _check(name, settings, directory)
    if isinstance(config, Config) and (Path(config.model) / "config.json").is_file():
        _check_engine(config)


def planned_model(config: AnyConfig) -> Model:
    """Returns the sizes of the model, from which its memory is estimated.

    Those of a model that the registry does not know are counted by the trainer's code, which takes seconds.

    Raises:
        NotFound: The model has no config.json on this host.
        InvalidInput: The trainer would refuse the model, or torch, which counts its parameters, is not installed here.
    """
    # A layout of strategy megatron, of any model, needs to know the layers.
    strategy = "megatron" if any(_layouts(config)) else "fsdp"
    return read_model(Path(config.model), config.trainer.model_copy(update={"strategy": strategy}))


def show_plan(config: AnyConfig, console: Console, *, is_gpu: bool) -> None:
    """Prints the plan of `config` for ranks that compute on GPUs, or on CPU.

    Raises:
        NotFound: The model has no config.json on this host.
        InvalidInput: See `check_model`.
    """
    check_model(config)
    model = planned_model(config)
    where = "on GPUs" if is_gpu else "on CPU (for GPUs, add --device gpu)"
    size = f"{counted(model.num_layers, 'layer')}, {_count(model.num_parameters)} parameters"
    lines = [f"{model.model_type}: {size}, {where}"]
    for name, settings in _layouts(config):
        layout = layout_of(settings)
        lines.append(f"{name}: {_sizes(layout)}")
        if model.num_experts:
            lines.append(f"  experts: ETP {layout.etp} x EP {layout.ep} x PP {layout.pp} x {layout.edp} copies")
    _print_lines(console, lines)
    if isinstance(model, Architecture) and config.trainer.strategy == "megatron":
        console.print(_rank_table(layout_of(config.trainer), model))
    memories = rank_memory(config, model, is_gpu=is_gpu)
    console.print(_parts_table(memories))
    console.print(_phases_table(memories))
    lines = list(_offloaded(config))
    if not is_gpu:
        ranks = config.trainer.num_ranks
        total = sum(memory.peak for memory in memories.values()) * ranks // len(memories)
        whole = f"all {ranks} ranks together, at their peaks" if ranks > 1 else "the rank, at its peak"
        lines.insert(0, f"{whole}: {total / 2**30:.2f} GiB")
    lines += [frozen.line for frozen in frozen_models(config, model, is_gpu=is_gpu) if not frozen.is_shared]
    lines += _own_critic(config, model, is_gpu=is_gpu)
    if isinstance(config, SftConfig):
        lines.append(_batch(config))
    else:
        lines += [
            _publication(config, model, is_gpu=is_gpu),
            _batch(config),
            *_blocks(config),
            *_lag_and_replicas(config),
        ]
        if config.placement == "colocated" and is_gpu:
            lines.append(_shared(config, model, memories.values(), console))
        lines += environment_plan(config)
    if isinstance(model, MeasuredModel):
        lines.append(_MEASURED + (_ROWS if model.layout == "rows" else ""))
    _print_lines(console, [*lines, _assumptions(config, is_gpu=is_gpu)])


def _layouts(config: AnyConfig) -> Iterator[tuple[str, TrainerConfig]]:
    return ((name, model) for name, model in config.models.items() if model.strategy == "megatron")


def _check(name: str, settings: TrainerConfig, directory: Path) -> None:
    require_supported(read_content(directory), settings.strategy, f"{directory}/config.json")
    if settings.strategy == "megatron":
        model = read_architecture(directory)
        check_layout(settings.megatron, settings.num_ranks, architecture=model, key=f"{name}.megatron")


def _check_engine(config: Config) -> None:
    """Checks that vLLM can cut the model's heads: evenly those of queries, and those of keys and values evenly, or into
    the same number of copies of each. Latent attention has no heads of keys and values to cut."""
    content, tp = text_of(read_content(config.model)), config.rollout.tensor_parallel_size
    heads = content.get("num_attention_heads")
    groups = heads if content.get("kv_lora_rank") else content.get("num_key_value_heads", heads)
    if not (isinstance(heads, int) and isinstance(groups, int) and heads > 0 and groups > 0):
        return  # the engine knows this model's heads by other names

    def is_legal(size: int) -> bool:
        return heads % size == 0 and (groups % size == 0 or size % groups == 0)

    if is_legal(tp):
        return
    rule = f"num_attention_heads {heads} must divide by it"
    if heads % tp == 0:
        rule = f"num_key_value_heads {groups} must be a multiple or a divisor of it"
    key = "rollout.tensor_parallel_size"
    message = f"{key} {tp}: the model's {rule}; nearest legal: {nearest(tp, is_legal, heads)}"
    raise InvalidInput(message, reason=Reason.INVALID_CONFIG, field=key)


def _rank_table(layout: Layout, model: Architecture) -> Table:
    columns = ("rank", "gpu", "tp", "cp", "dp", "pp", "ep", "etp", "layers", "experts")
    table = _table(*columns, title=f"Ranks, on hosts of {_GPUS_PER_HOST} GPUs")
    for at in rank_map(layout):
        places = (at.rank, at.rank % _GPUS_PER_HOST, at.tp, at.cp, at.dp, at.pp, at.ep, at.etp)
        layers = ", ".join(map(_range, layout.layers(model.num_layers, at.pp)))
        experts = _range(layout.experts(model.num_experts, at.ep)) if model.num_experts else "-"
        table.add_row(*map(str, places), layers, experts)
    return table


def _parts_table(memories: Mapping[str, Memory]) -> Table:
    """Returns a table of the memory of each kind of rank. `working` is the largest intermediate results, usually logits
    and their gradients, and on CPU the holes that they leave in the heap.
    """
    unit, size = _unit_for(max(memory.peak for memory in memories.values()))
    others = {"ref": "reference", "teacher": "teacher", "critic": "critic_state", "process": "base"}
    others = {title: part for title, part in others.items() if any(getattr(m, part) for m in memories.values())}
    columns = ["ranks", "params", "weights", "grads", "optimizer", "activations", "working"]
    columns += others
    table = _table(*columns, title=f"Memory per rank in {unit}")
    if len(columns) > 9:
        table.padding = (0, 0, 0, 0)  # so that 80 columns of text hold it
    for name, memory in memories.items():
        cells = [f"{part / size:.2f}" for part in (memory.weights, memory.gradients, memory.optimizer)]
        cells.append(f"{memory.activations / size:.2f} x{memory.in_flight:g}")
        cells.append(f"{(memory.gathered + memory.microbatch.backward + memory.microbatch.holes) / size:.2f}")
        cells += [f"{getattr(memory, part) / size:.2f}" for part in others.values()]
        table.add_row(name, _count(memory.parameters), *cells)
    return table


def _phases_table(memories: Mapping[str, Memory]) -> Table:
    unit, size = _unit_for(max(memory.peak for memory in memories.values()))
    names = next(iter(memories.values())).phases
    table = _table("ranks", *names, "peak", "idle", title=f"Peak of each phase per rank in {unit}")
    for name, memory in memories.items():
        table.add_row(name, *(f"{one / size:.2f}" for one in (*memory.phases.values(), memory.peak, memory.idle)))
    return table


def _shared(config: Config, model: Model, ranks: Collection[Memory], console: Console) -> str:
    """Prints the memory of a GPU that trainer and engine share, in each phase. Returns an explanation of it."""
    phases = colocated_phases(config, model, ranks)
    unit, size = _unit_for(max(phase.total for phase in phases))
    table = _table("phase", "trainer", "engine", "both", title=f"Memory of a shared GPU in {unit}")
    for phase in phases:
        table.add_row(phase.name, *(f"{part / size:.2f}" for part in (phase.trainer, phase.engine, phase.total)))
    console.print(table)
    pinned_bytes = 0 if config.is_side_by_side else host_bytes(ranks)
    unit, size = _unit_for(pinned_bytes)
    when = "all phases" if config.is_side_by_side else "generate"
    return (
        f"{when}: the KV cache takes the engine to {utilization(config):.0%} of the GPU. publish: two buffers are "
        f"counted with the trainer. Pinned host memory: {pinned_bytes / size:.2f} {unit} for each of "
        f"{config.trainer.num_ranks} ranks. Not counted: contexts and CUDA graphs of both processes."
    )


def _own_critic(config: AnyConfig, model: Model, *, is_gpu: bool) -> Iterator[str]:
    critic = None if is_shared(config, "critic") else critic_memory(config, model, is_gpu=is_gpu)
    if critic:
        ranks = counted(config.models["critic"].num_ranks, "rank")
        idle, peak = (size / 2**30 for size in (critic.idle, critic.peak))
        yield f"critic: on {ranks} of its own, on each {idle:.2f} GiB between updates, {peak:.2f} at its peak"


def _offloaded(config: AnyConfig) -> Iterator[str]:
    names = ["grads", "optimizer", "params"] if config.trainer.fsdp.cpu_offload else []
    if config.trainer.strategy == "megatron":
        names = sorted(config.trainer.megatron.offloads)
    if names:
        yield f"offloaded to host memory between phases (idle): {', '.join(names)}"


def _publication(config: AnyConfig, model: Model, *, is_gpu: bool) -> str:
    num_bytes, buckets = publication(config, model, is_gpu=is_gpu)
    unit, size = _unit_for(num_bytes)
    rank = config.trainer.lora.published_rank
    what = f"adapters of rank {rank}" if rank else "whole checkpoint"
    layout = layout_of(config.trainer)
    # A slot can end before its bucket is full, so there can be more buckets if several ranks send.
    least = "" if rank or layout.tp * layout.pp * layout.ep == 1 else "at least "
    return f"publication: {num_bytes / size:.2f} {unit} ({num_bytes} bytes, {what}), buckets: {least}{buckets}"


def _batch(config: AnyConfig) -> str:
    if isinstance(config, SftConfig):
        samples = config.data.samples_per_step // config.trainer.num_minibatches
    else:
        groups = config.data.prompts_per_step // config.trainer.num_minibatches
        samples = groups * config.rollout.completions_per_prompt
    ranks = data_parallel_size(config.trainer)
    where = f"each of {ranks} data-parallel ranks" if ranks > 1 else "the only data-parallel rank"
    each = f"{samples // ranks}" + (f" or {samples // ranks + 1}" if samples % ranks else "")
    return f"batch: {samples} samples per mini-batch, {each} on {where}"


def _blocks(config: Config) -> Iterator[str]:
    size, trainer = streaming.tokens_per_block(config), config.trainer
    if not size:
        return
    when = ", trained on as soon as they are scored"
    if not streaming.streams(config):
        when = "; not streamed: the trainer gets the batch when it is complete"
    idle = ""
    if (layout := layout_of(trainer)).pp > 1:
        num_tokens = min(size, streaming.most_tokens_per_minibatch(config))
        num_microbatches = -(-num_tokens // (trainer.max_tokens_per_microbatch * layout.dp))
        share = (layout.pp - 1) / (layout.vpp * num_microbatches + layout.pp - 1)
        idle = f"; the pipeline idles for {share:.0%} of each, more of one with fewer tokens"
    num_minibatches, rest = trainer.num_minibatches, ""
    if num_minibatches > 1:
        rest = f"; they are the first of {num_minibatches} mini-batches, and each of the others is trained on at once"
    growth, cutter = streaming.block_growth(config), streaming.block_cutter(config)
    first = f", the first of {cutter.least_tokens} and each of {growth} more" if growth and cutter else ""
    yield f"blocks: groups of at least {size} tokens together{first}{when}{idle}{rest}"


def _lag_and_replicas(config: Config) -> Iterator[str]:
    if lag := config.trainer.lag.versions:
        yield f"lag: the batch that updates version t is generated by version t - {lag}, during earlier updates"
    if source := config.rollout.discovery:
        is_file = source.kind == "file"
        where = f"the lines of {source.path}" if is_file else f"all addresses of {source.name}:{source.port}"
        yield f"replicas: {where}; they may come and go, and take part from the next publication"


def _assumptions(config: AnyConfig, *, is_gpu: bool) -> str:
    trainer, is_bfloat16 = config.trainer, weight_bytes(config.trainer, is_gpu=is_gpu) == 2
    if trainer.strategy == "fsdp":
        whole = "" if trainer.fsdp.reduce_each_microbatch else ", whole on each rank until the last micro-batch"
        state = f"float32 weights 4, grads 4{whole}, Adam moments 8"
    else:
        bytes_ = StateBytes.of(trainer, is_gpu=is_gpu)
        optimizer = (f"master {bytes_.master} + " if bytes_.master else "") + f"Adam moments {bytes_.moments}"
        if bytes_.device_share < 1:
            optimizer += f" of {bytes_.device_share:.0%} of them, the rest in host memory"
        of_weights = "bf16 weights 2" if is_bfloat16 else "float32 weights 4"
        copies = f" (and {bytes_.gradient_copy} after the optimizer's step)" if bytes_.gradient_copy else ""
        state = f"{of_weights}, grads {bytes_.gradient}{copies}, optimizer: {optimizer}"
    computes = f"in {'bfloat16' if is_bfloat16 else 'float32'} on {'GPU' if is_gpu else 'CPU'}"
    recomputed = ", recomputed" if trainer.gradient_checkpointing else ""
    kernels = "fused kernels (arXiv 2205.05198)" if is_gpu else "plain torch operators, with the holes of the heap"
    left_out = "padding of samples of unequal length"
    if is_gpu:
        left_out = "buffers of collectives, fragmentation, up to 2 GiB of logits if few tokens are predicted"
    return (
        f"Bytes per parameter: {state}. Activations {computes}: micro-batches of {microbatch_tokens(config)} "
        f"tokens x those in flight, {kernels}{recomputed}. Working: a layer, or logits and their gradients, whichever "
        f"is larger, and gathered weights. Not counted: {left_out}."
    )


def _sizes(layout: Layout) -> str:
    sizes = f"TP {layout.tp} x PP {layout.pp} x CP {layout.cp} x DP {layout.dp}"
    return f"{counted(layout.world, 'rank')} = {sizes}{f', VPP {layout.vpp}' if layout.vpp > 1 else ''}"


def _table(*columns: str, title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, highlight=False)


def _range(numbers: range) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


def _unit_for(num_bytes: int) -> tuple[str, int]:
    return next((unit for unit in _UNITS if num_bytes >= unit[1]), _UNITS[-1])


def _count(number: int) -> str:
    for letter, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return str(number)
