"""Defines Megatron's parallel layouts: the coordinates of each rank, and the rules for parallel sizes.

It does not import torch, so that rules are checked before anything starts: those about sizes alone with the config, and
those about the model's shape when its config.json is available. Every error names the rule and the nearest legal
values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import cast

from services.common.config.megatron import UNEVEN, MegatronConfig, Problems, pass_through_problems
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput, Reason
from services.common.families.architecture import Architecture
from services.common.families.registry import MBRIDGE_TYPES

FP8_MULTIPLE = 16
"""Float8 matrix products need sizes that are a multiple of this."""


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of one rank: (tp, cp, dp, pp) for dense weights, (etp, ep, edp, pp) for experts."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Layout:
    """Parallel sizes: world = tp * cp * dp * pp = etp * ep * edp * pp. A stage has `vpp` chunks of layers.

    `first` and `last` are the number of layers of the first and of the last stage, if they differ from the others'.
    """

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    first: int | None = None
    last: int | None = None

    @classmethod
    def of(cls, megatron: MegatronConfig, num_ranks: int) -> "Layout":
        """Returns the layout of `megatron` on `num_ranks` ranks, which `check_layout` must accept."""
        tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
        cp, vpp = megatron.context_parallel_size, megatron.virtual_pipeline_model_parallel_size or 1
        dp = num_ranks // (tp * pp * cp)
        ends = (cast(int | None, megatron.transformer_config_kwargs.get(name)) for name in UNEVEN)
        return cls(num_ranks, tp, pp, vpp, cp, megatron.expert_model_parallel_size, megatron.etp, dp, *ends)

    @property
    def edp(self) -> int:
        """Number of copies of each expert."""
        return self.world // (self.pp * self.ep * self.etp)

    @property
    def align(self) -> int:
        """Returns the number that padded sequence lengths are a multiple of.

        Sequence parallelism splits a sequence into TP parts; CP splits it into 2 * CP parts for equal work.
        """
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    def layers(self, num_layers: int, pp: int) -> tuple[range, ...]:
        """Returns the layers of stage `pp`, one range per chunk (interleaved as in arXiv 2104.04473)."""
        sizes = [size // self.vpp for size in self.stage_sizes(num_layers)]
        starts = (chunk * sum(sizes) + sum(sizes[:pp]) for chunk in range(self.vpp))
        return tuple(range(start, start + sizes[pp]) for start in starts)

    def stage_sizes(self, num_layers: int) -> list[int]:
        """Returns the number of layers of each stage; only of a legal layout their sum is `num_layers`."""
        first, last = ([] if size is None else [size] for size in (self.first, self.last))
        num_others = self.pp - len(first + last)
        each = (num_layers - sum(first + last)) // num_others if num_others > 0 else 0
        return [*first, *[each] * num_others, *last]

    def experts(self, num_experts: int, ep: int) -> range:
        """Returns the experts of every layer that the ranks at `ep` hold."""
        size = num_experts // self.ep
        return range(ep * size, (ep + 1) * size)


def rank_map(layout: Layout) -> tuple[Coordinates, ...]:
    """Returns the coordinates of each rank, in Megatron's order "tp-cp-ep-dp-pp", where the first varies fastest."""
    ranks: list[Coordinates] = []
    for rank in range(layout.world):
        rest, tp = divmod(rank, layout.tp)
        rest, cp = divmod(rest, layout.cp)
        pp, dp = divmod(rest, layout.dp)
        # The same ranks once more, for experts: ETP and EP in place of TP, CP and DP.
        rest, etp = divmod(rank, layout.etp)
        rest, ep = divmod(rest, layout.ep)
        ranks.append(Coordinates(rank, tp, cp, dp, pp, etp, ep, rest % layout.edp))
    return tuple(ranks)


def layout_of(trainer: TrainerConfig) -> Layout:
    """Returns the layout of a model's ranks, which are all data-parallel with strategy fsdp."""
    if trainer.strategy != "megatron":
        return Layout(trainer.num_ranks, dp=trainer.num_ranks)
    return Layout.of(trainer.megatron, trainer.num_ranks)


def data_parallel_size(trainer: TrainerConfig) -> int:
    """Returns the number of ranks, or groups of ranks, that compute different samples."""
    return layout_of(trainer).dp


def microbatches_multiple(trainer: TrainerConfig) -> int:
    """Returns the number that a data-parallel rank's micro-batch count must be a multiple of: PP with VPP, else 1.

    An interleaved schedule runs micro-batches in rounds of PP (megatron.core.pipeline_parallel.schedules).
    """
    is_interleaved = trainer.strategy == "megatron" and trainer.megatron.virtual_pipeline_model_parallel_size
    return trainer.megatron.pipeline_model_parallel_size if is_interleaved else 1


def samples_at_once(trainer: TrainerConfig) -> int:
    """Returns the minimum number of samples: one per required micro-batch of each data-parallel rank."""
    return data_parallel_size(trainer) * microbatches_multiple(trainer)


def check_layout(
    megatron: MegatronConfig,
    num_ranks: int,
    *,
    architecture: Architecture | None = None,
    max_tokens: int | None = None,
    key: str = "trainer.megatron",
    section: str = "trainer",
) -> None:
    """Checks the rules for `num_ranks` and, if given, for the model's shape and for the token budget of micro-batches.

    Raises:
        InvalidInput: A rule is broken. The message has the rule, the key (below `key`, or below `section` if the rule
            is about the ranks), and the nearest legal values.
    """
    for name, problem in _broken_rules(megatron, num_ranks, architecture, max_tokens):
        field = name.replace("trainer", section, 1) if name.startswith("trainer.") else f"{key}.{name}"
        raise InvalidInput(f"{field} {problem}", reason=Reason.INVALID_CONFIG, field=field)


def _broken_rules(
    megatron: MegatronConfig, num_ranks: int, architecture: Architecture | None, max_tokens: int | None
) -> Problems:
    yield from _sizes(megatron, num_ranks)
    layout = Layout.of(megatron, num_ranks)
    if architecture is not None:
        yield from _tensor_parallel(layout, architecture)
    if max_tokens is not None and max_tokens % layout.align:
        parts = f"TP x 2 x CP = {layout.tp} x 2 x {layout.cp}" if layout.cp > 1 else "TP"
        yield (
            "trainer.max_tokens_per_microbatch",
            f"{max_tokens} must be a multiple of {parts} = {layout.align}, to which sequences are padded; nearest "
            f"legal: {nearest(max_tokens, lambda n: n % layout.align == 0, max_tokens + layout.align)}"
            + ("; TP must also divide the model's attention heads" if layout.tp > 1 else ""),
        )
    yield from pass_through_problems(megatron)
    if architecture is not None:
        if architecture.kv_lora_rank:  # Megatron would not sum the gradient of the part that all keys share over TP
            yield from _sequence_parallel(megatron, "latent keys")
        yield from _pipeline_and_experts(megatron, layout, architecture)
        yield from _windows_and_stacked_experts(megatron, layout, architecture)
        if megatron.fp8 != "none":
            yield from _float8(megatron, layout, architecture)
        if megatron.use_mbridge and architecture.model_type not in MBRIDGE_TYPES:
            yield (
                "use_mbridge",
                f"true: mbridge is supported for {', '.join(MBRIDGE_TYPES)}, not {architecture.model_type}; leave it "
                "out",
            )


def _sizes(megatron: MegatronConfig, num_ranks: int) -> Problems:
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    cp, ep, etp = megatron.context_parallel_size, megatron.expert_model_parallel_size, megatron.etp
    dense, expert = tp * pp * cp, pp * ep * etp
    if num_ranks % dense:
        yield (
            "trainer.num_ranks",
            f"{num_ranks} must be TP x PP x CP x DP, a multiple of {tp} x {pp} x {cp} = {dense}; nearest legal: "
            f"{nearest(num_ranks, lambda n: n % dense == 0, num_ranks + dense)}",
        )
    if num_ranks % expert:
        both = lcm(dense, expert)
        yield (
            "expert_model_parallel_size",
            f"{ep}: trainer.num_ranks {num_ranks} must be a multiple of PP x EP x ETP = {pp} x {ep} x {etp} = {expert}"
            f"; nearest legal EP: {nearest(ep, lambda n: num_ranks % (pp * n * etp) == 0, num_ranks) or 'none'}, "
            f"nearest legal num_ranks: {nearest(num_ranks, lambda n: n % both == 0, num_ranks + both)}",
        )
    if megatron.virtual_pipeline_model_parallel_size and pp == 1:
        yield (
            "virtual_pipeline_model_parallel_size",
            f"{megatron.virtual_pipeline_model_parallel_size}: interleaving needs pipeline_model_parallel_size (PP) of "
            "at least 2; nearest legal: PP 2, or VPP null",
        )
    if ep == 1 and etp != tp:
        yield (
            "expert_tensor_parallel_size",
            f"{etp}: with expert_model_parallel_size (EP) 1, ETP must be TP = {tp}, or Megatron-Core before 0.19 does "
            f"not sum the experts' gradients over TP; nearest legal: ETP {tp} or null, or EP of at least 2",
        )
    if ep > 1:
        yield from _sequence_parallel(megatron)
    for name in UNEVEN:
        size = megatron.transformer_config_kwargs.get(name)
        if size is not None and (type(size) is not int or size < 1):
            yield f"transformer_config_kwargs.{name}", f"{size!r} is not a number of layers"


def _sequence_parallel(megatron: MegatronConfig, what: str = "experts") -> Problems:
    if megatron.tensor_model_parallel_size > 1 and not megatron.has_sequence_parallel:
        yield (
            "sequence_parallel",
            f"false: {what} with TP {megatron.tensor_model_parallel_size} need it; nearest legal: true, null, or TP 1",
        )


def _tensor_parallel(layout: Layout, model: Architecture) -> Problems:
    # The sizes of a layer that TP cuts; those of heads have rules of their own.
    weights = [weight for weights in model.kind_weights.values() for weight in weights if not weight.is_expert]
    cuts = [rows for weight in weights if weight.cut == "rows" for rows in weight.rows]
    counts = {
        "num_attention_heads": model.num_attention_heads,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        **{size: model.size(size) for size in cuts if isinstance(size, str)},
    }
    if model.has("self_attention.linear_qkv.weight"):  # q, k and v are one matrix, which is split evenly
        counts["rows of q, k and v"] = model.query_size + 2 * model.key_value_size
    groups = model.num_key_value_heads
    if model.norms_all_heads:  # a rank that has a part of a key's head would count its squares more than once
        counts["num_key_value_heads"] = groups

    def is_legal(tp: int) -> bool:
        return all(count % tp == 0 for count in counts.values()) and (groups % tp == 0 or tp % groups == 0)

    if is_legal(layout.tp):
        return
    legal = f"nearest legal: {nearest(layout.tp, is_legal, model.num_attention_heads)}"
    for name, count in counts.items():
        if count % layout.tp:
            yield "tensor_model_parallel_size", f"{layout.tp}: the model's {name} {count} must divide by TP; {legal}"
    yield (
        "tensor_model_parallel_size",
        f"{layout.tp}: the model's num_key_value_heads {groups} must be a multiple or a divisor of TP; {legal}",
    )


def _pipeline_and_experts(megatron: MegatronConfig, layout: Layout, model: Architecture) -> Problems:
    sizes = layout.stage_sizes(model.num_layers)
    are_whole = all(size > 0 and size % layout.vpp == 0 for size in sizes)
    if len(sizes) != layout.pp or sum(sizes) != model.num_layers or not are_whole:
        fits_pp = nearest(layout.pp, lambda n: model.num_layers % (n * layout.vpp) == 0, model.num_layers)
        yield (
            "pipeline_model_parallel_size",
            f"{layout.pp}: the model's num_hidden_layers {model.num_layers} must divide by PP x VPP = "
            f"{layout.pp} x {layout.vpp}, or what transformer_config_kwargs.{' and '.join(UNEVEN)} leave to the other "
            f"stages; nearest legal PP with this VPP: {fits_pp or 'none'}",
        )
    if not model.num_experts:
        if layout.ep > 1:
            yield (
                "expert_model_parallel_size",
                f"{layout.ep}: model_type {model.model_type} has no experts; nearest legal: EP 1 with ETP {layout.tp} "
                "or null",
            )
        return
    counts = {"expert_model_parallel_size": (layout.ep, "num_experts", model.num_experts)}
    counts["expert_tensor_parallel_size"] = (layout.etp, "moe_intermediate_size", model.moe_intermediate_size)
    for key, (size, name, count) in counts.items():
        if count % size:
            fits = nearest(size, lambda n, count=count: count % n == 0, count)
            yield key, f"{size}: the model's {name} {count} must divide by it; nearest legal: {fits}"
    own = {"score_function": model.family.router, "enable_expert_bias": model.has("mlp.router.expert_bias")}
    for key, value in own.items():
        given = getattr(megatron.moe, f"router_{key}")
        if given not in (None, value):
            yield f"moe.router_{key}", f"{given}: the model's is {value}; nearest legal: {value} or null"
    yield from _sequence_parallel(megatron)
    if megatron.moe.token_dispatcher_type == "flex" and layout.ep * layout.etp == 1:
        yield "moe.token_dispatcher_type", "flex needs EP x ETP of at least 2; nearest legal: alltoall, or EP 2"
    if megatron.moe.token_dispatcher_type == "allgather" and (why := _why_not_gathered(megatron)):
        yield "moe.token_dispatcher_type", f"allgather {why}; nearest legal: alltoall"


def _windows_and_stacked_experts(megatron: MegatronConfig, layout: Layout, model: Architecture) -> Problems:
    if layout.cp > 1 and model.family.has_windows:
        yield (
            "context_parallel_size",
            f"{layout.cp}: attention with windows does not cut sequences; nearest legal: CP 1, with TP or PP instead",
        )
    if not model.has_stacked_experts:
        return
    if layout.ep > 1:
        yield (
            "expert_model_parallel_size",
            f"{layout.ep}: the model's checkpoint has the experts of a layer in one tensor, which EP does not "
            "distribute; nearest legal: EP 1",
        )
    if not megatron.moe.grouped_gemm:
        yield "moe.grouped_gemm", "false: the model's experts are only computed together; nearest legal: true"


def _float8(megatron: MegatronConfig, layout: Layout, model: Architecture) -> Problems:
    if model.num_experts:
        yield (
            "fp8",
            f"{megatron.fp8}: TransformerEngine computes each expert by itself in float8, and a step with 128 experts "
            "took four times as long as in bfloat16; nearest legal: none",
        )
        return
    for weight in (weight for weights in model.kind_weights.values() for weight in weights):
        if not weight.is_linear:
            continue
        shapes, ranks = model.part_shapes(weight), layout.tp
        rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
        rows //= ranks if weight.cut in ("rows", "groups") else 1
        columns //= ranks if weight.cut == "columns" else 1
        if rows % FP8_MULTIPLE or columns % FP8_MULTIPLE:
            yield (
                "fp8",
                f"{megatron.fp8}: {weight.parameter} is {rows} x {columns} on each rank, and float8 needs multiples of "
                f"{FP8_MULTIPLE}; nearest legal: none" + (", or a smaller TP" if ranks > 1 else ""),
            )


def gathers_tokens(megatron: MegatronConfig, num_experts_per_tok: int) -> bool:
    """Returns whether the ranks of experts gather all tokens; auto chooses that where it sends less than all-to-all.

    A rank receives each token of the EP - 1 others once, and with all-to-all one copy for each of its experts, on
    average num_experts_per_tok / EP.
    """
    ep, kind = megatron.expert_model_parallel_size, megatron.moe.token_dispatcher_type
    if kind == "auto":
        return 1 < ep < num_experts_per_tok and not _why_not_gathered(megatron)
    return kind == "allgather" and ep > 1


def _why_not_gathered(megatron: MegatronConfig) -> str:
    """Returns why the ranks of experts cannot gather all tokens, or "" if they can."""
    options = megatron.transformer_config_kwargs
    if not megatron.moe.grouped_gemm:
        return "needs moe.grouped_gemm"
    if megatron.etp > 1:
        return f"does not cut experts, and expert_tensor_parallel_size is {megatron.etp}"
    if megatron.moe.aux_loss_coeff or options.get("moe_z_loss_coeff"):
        return "pads micro-batches to one size on all ranks, and the losses of the router would count the padding"
    others = ("moe_expert_capacity_factor", "moe_router_padding_for_quantization", "moe_shared_expert_overlap")
    return next((f"does not work with transformer_config_kwargs.{name}" for name in others if options.get(name)), "")


def nearest(value: int, is_legal: Callable[[int], bool], limit: int) -> str:
    """Returns the nearest legal numbers below and above `value`, up to `limit`, as text; empty if there are none."""
    below = next((n for n in range(value - 1, 0, -1) if is_legal(n)), None)
    above = next((n for n in range(value + 1, limit + 1) if is_legal(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def check_minibatches(name: str, model: TrainerConfig, key: str, count: int, completions_per_prompt: int = 1) -> None:
    """Raises ValueError if a batch, of which `key` is the `count` of prompts or rows, does not divide into mini-batches
    with samples for every rank."""
    num_minibatches = model.num_minibatches
    if count % num_minibatches:
        legal = nearest(count, lambda n: n % num_minibatches == 0, count + num_minibatches)
        raise ValueError(
            f"{key} {count} must be divisible by {name}.num_minibatches {num_minibatches}; nearest: {legal}, or set "
            f"num_minibatches to a divisor of {count}"
        )
    samples = count // num_minibatches * completions_per_prompt
    if samples < samples_at_once(model):
        fewest = microbatches_multiple(model)
        times = " * completions_per_prompt" if completions_per_prompt > 1 else ""
        raise ValueError(
            f"a mini-batch has {samples} samples ({key} / num_minibatches{times}) for {named_ranks(name, model)}; "
            f"every rank needs at least {'one' if fewest == 1 else fewest}, together {samples_at_once(model)}"
        )


def named_ranks(name: str, model: TrainerConfig) -> str:
    """Returns the key and number of a model's ranks, with what they are divided into, for an error."""
    size = data_parallel_size(model)
    of_all = "" if size == model.num_ranks else f" (data-parallel size {size}: num_ranks / (TP x PP x CP))"
    stages = microbatches_multiple(model)
    return f"{name}.num_ranks {model.num_ranks}{of_all}" + (f" x PP {stages}, interleaved" if stages > 1 else "")
