"""Defines the Megatron layouts that the tests compare, and the changes of the config that they are made of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.trainer.fsdp_harness import FULL_LOSS

# This makes three micro-batches on one data-parallel rank, and two on each of two.
SMALL = {"max_tokens_per_microbatch": 64}
# On-policy, the surrogate alone is a mean of advantages and cancels to almost 0; the entropy makes the loss of size 1.
LOSS = {"entropy_coef": 0.5}
TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
GATHERED = {"moe": {"token_dispatcher_type": "allgather"}}
VPP = {"virtual_pipeline_model_parallel_size": 2}
UNEVEN = {"transformer_config_kwargs": {"num_layers_in_first_pipeline_stage": 1}}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
UNPACKED = {"packed_sequences": False}
# A bucket has only a few matrices, so that there are several buckets whose slots overlap.
OVERLAP = {"ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10000}}
AUX = {
    "moe": {"load_balancing_type": "aux_loss", "aux_loss_coeff": 0.1},
    "transformer_config_kwargs": {"moe_z_loss_coeff": 0.01},
}
FULL = SMALL | {"num_minibatches": 2, "num_epochs": 2, "loss": FULL_LOSS}


FAMILIES = (
    "llama",
    "llama-linear",
    "llama-llama3",
    "mistral",
    "qwen2",
    "qwen2-tied",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe-unnormalized",
    "qwen3_moe-mixed",
    "glm4_moe",
    "minimax_m2",
    "olmo2",
    "olmo3",
    "mixtral",
    "gpt_oss",
    "qwen2_moe",
    "qwen2_moe-normalized",
    "phi3",
    "deepseek_v3",
    "deepseek_v3-yarn",
    "glm4_moe_lite",
)


@dataclass(frozen=True)
class Layout:
    """Describes model kind, parallel sizes, and changes of config; `like` names the layout that results must equal."""

    kind: str
    world: int
    megatron: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    like: str = ""
    align: int = 1
    """All sequences of the batches have a multiple of this many tokens."""
    num_updates: int = 2
    has_routed_experts: bool = False
    """The samples have routed experts, which are not those that the routers would choose."""
    has_broken_norms: bool = False
    """The gradients of the norms are not summed over the tensor-parallel ranks."""


def _layouts() -> Iterator[tuple[str, Layout]]:
    for kind in ("untied", "tied", "moe", "deep"):
        yield f"{kind}-1", Layout(kind, 1)
        yield f"{kind}-1-small", Layout(kind, 1, {}, SMALL, f"{kind}-1")
    for kind in ("untied", "moe"):
        yield f"{kind}-1-unpacked", Layout(kind, 1, UNPACKED, SMALL, f"{kind}-1")
    dense: dict[str, tuple[int, dict[str, Any]]] = {
        "tp2": (2, TP),
        "pp2": (2, PP),
        "cp2": (2, CP),
        "dp2": (2, {}),
        "dp2-plain": (2, {"use_distributed_optimizer": False}),
        "tp2-pp2": (4, TP | PP),
        "pp2-dp2": (4, PP),
        "tp2-cp2": (4, TP | CP),
    }
    for kind in ("untied", "tied"):
        for name, (world, megatron) in dense.items():
            yield f"{kind}-{name}", Layout(kind, world, megatron, SMALL, f"{kind}-1")
    experts: dict[str, tuple[int, dict[str, Any]]] = {
        "ep2": (2, EP),
        "tp2-ep2-etp1": (2, TP | EP | {"expert_tensor_parallel_size": 1}),
        "ep2-etp2": (4, TP | EP),
        "ep2-pp2": (4, EP | PP),
        "ep2-gathered": (2, EP | GATHERED),
        "ep4-gathered": (4, {"expert_model_parallel_size": 4} | GATHERED),
        "tp2-ep2-etp1-gathered": (2, TP | EP | GATHERED | {"expert_tensor_parallel_size": 1}),
        "cp2-ep2-gathered": (2, CP | EP | GATHERED),
        "ep2-pp2-gathered": (4, EP | PP | GATHERED),
    }
    for name, (world, megatron) in experts.items():
        yield f"moe-{name}", Layout("moe", world, megatron, SMALL, "moe-1")
    for name, megatron in (("tp2", TP), ("cp2", CP)):
        yield f"untied-{name}-unpacked", Layout("untied", 2, megatron | UNPACKED, SMALL, "untied-1")
    yield "moe-ep2-unpacked", Layout("moe", 2, EP | UNPACKED, SMALL, "moe-1")
    yield "moe-ep2-unpacked-gathered", Layout("moe", 2, EP | UNPACKED | GATHERED, SMALL, "moe-1")
    yield "deep-vpp2", Layout("deep", 2, PP | VPP, SMALL, "deep-1")
    yield "deep-vpp2-unpacked", Layout("deep", 2, PP | VPP | UNPACKED, SMALL, "deep-1")
    yield "deep-vpp2-tp2", Layout("deep", 4, TP | PP | VPP, SMALL, "deep-1")
    yield from _routed()
    yield from _options()


def _routed() -> Iterator[tuple[str, Layout]]:
    """Yields layouts with replayed routed experts that cut tokens or layers, or compute them again."""
    again = SMALL | {"gradient_checkpointing": True}  # in a pipeline, after the forward passes of other micro-batches
    cases: tuple[tuple[str, int, dict[str, Any], dict[str, Any], str], ...] = (
        ("1", 1, {}, {}, ""),
        ("1-small", 1, {}, SMALL, "1"),
        ("1-recompute", 1, {}, again, "1-small"),
        ("1-recompute-selective", 1, SELECTIVE, again, "1-small"),
        ("tp2", 2, TP, SMALL, "1"),
        ("cp2", 2, CP, SMALL, "1"),
        ("cp2-unpacked", 2, CP | UNPACKED, SMALL, "1"),
        ("ep2", 2, EP, SMALL, "1"),
        ("pp2", 2, PP, again, "1"),
        ("ep2-pp2", 4, EP | PP, SMALL, "1"),
        ("ep2-gathered", 2, EP | GATHERED, again, "1"),
        ("deep-1", 1, {}, SMALL, ""),
        ("deep-vpp2", 2, PP | VPP, again, "deep-1"),
    )
    for name, world, megatron, changes, like in cases:
        kind = "deep-moe" if "deep" in name else "moe"
        yield (
            f"routed-{name}",
            Layout(kind, world, megatron, changes, like and f"routed-{like}", has_routed_experts=True),
        )


def _options() -> Iterator[tuple[str, Layout]]:
    """Yields layouts for everything besides parallel sizes."""
    yield "untied-tp2-no-sp", Layout("untied", 2, TP | {"sequence_parallel": False}, SMALL, "untied-1")
    yield "untied-dp2-overlap", Layout("untied", 2, OVERLAP, SMALL, "untied-1")
    yield "tied-pp2-dp2-overlap", Layout("tied", 4, PP | OVERLAP, SMALL, "tied-1")
    yield "moe-ep2-overlap", Layout("moe", 2, EP | OVERLAP, SMALL, "moe-1")
    # Of this model only experts have replicas.
    replicated = {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1} | EP | OVERLAP
    yield "moe-tp4-ep2-etp1-overlap", Layout("moe", 4, replicated, SMALL, "moe-1")
    yield "untied-tp2-broken", Layout("untied", 2, TP, SMALL, "untied-1", num_updates=1, has_broken_norms=True)
    recompute = SMALL | {"gradient_checkpointing": True}
    yield "moe-1-recompute", Layout("moe", 1, {}, recompute, "moe-1-small")
    yield "moe-1-recompute-selective", Layout("moe", 1, SELECTIVE, recompute, "moe-1-small")
    yield "untied-tp2-recompute", Layout("untied", 2, TP, recompute, "untied-tp2")
    yield "untied-1-full", Layout("untied", 1, {}, FULL)
    other = {"reference": {"megatron": PP}}
    yield "untied-tp2-full", Layout("untied", 2, TP, FULL, "untied-1-full")
    yield (
        "untied-tp2-full-reference-dp2",
        Layout("untied", 2, TP, FULL | {"reference": {"megatron": {}}}, "untied-1-full"),
    )
    yield "untied-cp2-full-reference-pp2", Layout("untied", 2, CP, FULL | other, "untied-1-full")
    frozen = {"moe": {"freeze_router": True}}
    yield "moe-1-frozen", Layout("moe", 1, frozen, SMALL)
    yield "moe-ep2-frozen", Layout("moe", 2, EP | frozen, SMALL, "moe-1-frozen")
    # The auxiliary loss is that of a micro-batch: this budget makes the same, without padding, on one rank and two.
    same = {"max_tokens_per_microbatch": 40}
    yield "moe-1-aux", Layout("moe", 1, AUX, same, align=4)
    for name, megatron in (("dp2", {}), ("tp2", TP), ("pp2", PP), ("cp2", CP), ("ep2", EP)):
        yield f"moe-{name}-aux", Layout("moe", 2, AUX | megatron, same, "moe-1-aux", align=4)
    for name in ("param_offload", "grad_offload", "optimizer_offload", "auto_offload"):
        yield f"untied-dp2-{name}", Layout("untied", 2, {name: True}, SMALL, "untied-dp2")
    plain = {"use_distributed_optimizer": False}
    yield (
        "untied-dp2-plain-auto_offload",
        Layout("untied", 2, plain | {"auto_offload": True}, SMALL, "untied-dp2-plain"),
    )
    yield "untied-1-bf16", Layout("untied", 1, {}, SMALL | {"compute_dtype": "bfloat16"})
    yield (
        "untied-1-bf16-auto_offload",
        Layout("untied", 1, {"auto_offload": True}, SMALL | {"compute_dtype": "bfloat16"}, "untied-1-bf16"),
    )


LAYOUTS = dict(_layouts())
# These run only when they are named; their models are made where they are tested.
FAMILY_LAYOUTS = {
    **{kind: Layout(kind, 1, num_updates=1) for kind in FAMILIES},
    **{
        f"{kind}-{name}": Layout(kind, 2, megatron, SMALL, num_updates=1)
        for kind, splits in (
            ("phi3", {"tp2": TP, "pp2": PP}),
            ("deepseek_v3", {"tp2-ep2": TP | EP | {"expert_tensor_parallel_size": 1}, "pp2": PP, "cp2": CP}),
            ("deepseek_v3-yarn", {"tp2": TP}),
            ("qwen2_moe", {"tp2": TP, "pp2": PP, "ep2": EP}),
            ("minimax_m2", {"tp2-ep2": TP | EP | {"expert_tensor_parallel_size": 1}}),
            ("olmo2", {"tp2": TP, "pp2": PP}),
            ("olmo3", {"tp2": TP | UNPACKED, "pp2": PP}),
            ("gpt_oss", {"tp2": TP | UNPACKED, "pp2": PP}),
            ("qwen3_moe-mixed", {"pp2": PP | UNEVEN}),
            ("glm4_moe", {"tp2": TP, "pp2": PP | UNEVEN, "ep2": EP, "cp2": CP}),
        )
        for name, megatron in splits.items()
    },
    "qwen2_moe-tp2-ep2": Layout("qwen2_moe", 2, TP | EP | {"expert_tensor_parallel_size": 1}, SMALL, num_updates=1),
    # Beside a dense layer, one of experts with latent attention computes with experts that it is given.
    "deepseek_v3-routed": Layout(
        "deepseek_v3", 2, TP | EP | {"expert_tensor_parallel_size": 1}, SMALL, num_updates=1, has_routed_experts=True
    ),
    # One of the four ranks' two stages has a dense layer only.
    "deepseek_v3-tp2-ep2-etp2": Layout("deepseek_v3", 4, TP | EP, SMALL, num_updates=1),
    "deepseek_v3-yarn-tp2-cp2": Layout("deepseek_v3-yarn", 4, TP | CP | UNPACKED, SMALL, num_updates=1),
    "glm4_moe-pp2-tp2": Layout("glm4_moe", 4, PP | UNEVEN | TP, SMALL, num_updates=1),
    "glm4_moe-pp2-ep2": Layout("glm4_moe", 4, PP | UNEVEN | EP, SMALL, num_updates=1),
    "glm4_moe-tp2-ep2-etp2": Layout("glm4_moe", 4, TP | EP, SMALL, num_updates=1),
    "glm4_moe-cp2-ep2": Layout("glm4_moe", 4, CP | EP, SMALL, num_updates=1),
    "glm4_moe-bf16": Layout("glm4_moe-bf16", 1, changes={"compute_dtype": "bfloat16"}, num_updates=0),
    "qwen3-bf16": Layout("qwen3-bf16", 1, changes={"compute_dtype": "bfloat16"}, num_updates=0),
    "qwen3_moe-bf16": Layout("qwen3_moe-bf16", 1, changes={"compute_dtype": "bfloat16"}, num_updates=0),
}
# Only make test-long runs the other layouts: these have what they have, each together with something else.
LONG = LAYOUTS.keys() - {
    *("untied-1", "untied-1-small", "tied-1", "moe-1", "moe-1-small", "deep-1", "routed-1", "routed-deep-1"),
    *("untied-tp2", "untied-dp2", "untied-dp2-plain", "untied-tp2-pp2", "tied-tp2", "tied-pp2-dp2-overlap"),
    *("deep-vpp2", "moe-ep2-etp2", "moe-ep2-unpacked", "moe-tp2-ep2-etp1-gathered", "routed-cp2", "routed-deep-vpp2"),
    *("untied-tp2-no-sp", "untied-tp2-broken", "moe-1-recompute-selective", "moe-1-frozen", "moe-1-aux", "moe-ep2-aux"),
    *("untied-1-full", "untied-cp2-full-reference-pp2", "untied-1-bf16", "untied-dp2-auto_offload"),
}
assert all(LAYOUTS[name].like not in LONG for name in LAYOUTS if name not in LONG)
