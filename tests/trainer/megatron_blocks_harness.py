"""Trains in blocks on real ranks: Megatron in every layout, and FSDP.

The same updates are made with whole batches, in blocks as with streaming off, and in blocks with everything that comes
between those of a stream.

One process imports everything and forks the ranks of one world after the other. They write their results to
DIRECTORY/NAME-{whole,off,on}.{safetensors,json}.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from services.common.batches import BlockCutter, blocks_of, trained_tokens
from services.trainer.backend import Role
from services.trainer.samples import train_parts
from tests.support import with_routed_experts
from tests.trainer.fsdp_harness import FULL_LOSS, OPTIM, TEMPERATURE, samples, write
from tests.trainer.megatron_harness import MegatronHarness, run_all, run_ranks
from tests.trainer.megatron_layouts import CP, EP, GATHERED, LOSS, OVERLAP, PP, SMALL, TP, VPP, Layout
from tests.trainer.updating import counts_of

NUM_UPDATES = 2
MODES = ("whole", "off", "on")
KL = {"loss": FULL_LOSS}
FSDP = {"strategy": "fsdp"}
SCHEDULE = {"optim": {**OPTIM, "warmup_steps": 8}}
MINIBATCHES: dict[str, dict[str, Any]] = {
    "recompute": {"num_minibatches": 2, **KL, **SCHEDULE},
    "engine": {"num_minibatches": 2, "loss": LOSS | {"old_logprobs": "engine"}, **SCHEDULE},
    "on_policy": {"num_minibatches": 4, "loss": LOSS | {"old_logprobs": "on_policy"}},
}
LORA = {"lora": {"rank": 4, "alpha": 8.0}}


def _layouts() -> Iterator[tuple[str, Layout]]:
    yield "untied-fsdp1-lora", _layout("untied", 1, {}, FSDP | LORA | KL)
    yield "untied-fsdp2-kl", _layout("untied", 2, {}, FSDP | KL)
    yield "moe-fsdp2", _layout("moe", 2, {}, FSDP)
    splits: dict[str, dict[str, Any]] = {"tp2": TP, "pp2": PP, "cp2": CP, "dp2": {}}
    yield "untied-1", _layout("untied", 1, {})
    yield "untied-1-kl", _layout("untied", 1, {}, KL)
    yield "moe-1", _layout("moe", 1, {})
    yield "untied-1-lora", _layout("untied", 1, {}, LORA)
    yield "untied-1-bf16", _layout("untied", 1, {}, {"compute_dtype": "bfloat16"})
    for name, megatron in splits.items():
        yield f"tied-{name}", _layout("tied", 2, megatron)
        yield f"untied-{name}-kl", _layout("untied", 2, megatron, KL)
        yield f"untied-{name}-lora", _layout("untied", 2, megatron, LORA | KL)
    yield "moe-ep2", _layout("moe", 2, EP)
    yield "moe-ep2-gathered", _layout("moe", 2, EP | GATHERED)
    yield "routed-pp2", replace(_layout("moe", 2, PP, {"gradient_checkpointing": True}), has_routed_experts=True)
    yield "deep-vpp2", _layout("deep", 2, PP | VPP)
    yield "untied-fsdp2-recompute", _layout("untied", 2, {}, FSDP | MINIBATCHES["recompute"])
    yield "untied-1-engine", _layout("untied", 1, {}, MINIBATCHES["engine"])
    yield "untied-tp2-on_policy", _layout("untied", 2, TP, MINIBATCHES["on_policy"])
    offloaded = PP | {"auto_offload": True}
    yield "untied-pp2-recompute-auto_offload", _layout("untied", 2, offloaded, LORA | MINIBATCHES["recompute"])
    routed = _layout("moe", 2, EP, {"num_minibatches": 2})
    yield "routed-ep2-minibatches", replace(routed, has_routed_experts=True)
    yield "untied-dp2-plain", _layout("untied", 2, {"use_distributed_optimizer": False})
    yield "untied-dp2-overlap", _layout("untied", 2, OVERLAP)
    yield "untied-dp2-one_bucket-overlap", _layout("untied", 2, {"ddp_config": {"overlap_grad_reduce": True}})
    yield "tied-pp2-overlap", _layout("tied", 2, PP | OVERLAP)
    yield "moe-ep2-overlap", _layout("moe", 2, EP | OVERLAP)
    yield "untied-dp2-auto_offload", _layout("untied", 2, {"auto_offload": True})


def _layout(kind: str, world: int, megatron: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Layout:
    return Layout(kind, world, megatron, SMALL | {"loss": LOSS} | dict(changes or {}))


LAYOUTS = dict(_layouts())
# Only make test-long runs the other layouts: these have what they have, each together with something else.
LONG = LAYOUTS.keys() - {
    *("untied-fsdp1-lora", "untied-fsdp2-recompute", "untied-1-bf16", "untied-tp2-kl", "untied-pp2-lora", "tied-pp2"),
    *("deep-vpp2", "routed-ep2-minibatches", "untied-dp2-one_bucket-overlap", "untied-dp2-auto_offload"),
}


def run(harness: MegatronHarness, name: str, directory: Path) -> None:
    """Makes the same updates in each of MODES, from the same weights."""
    for mode in MODES:
        harness.open(LAYOUTS[name])
        metrics = []
        for seed in range(NUM_UPDATES):
            batch = with_routed_experts(samples(seed)) if LAYOUTS[name].has_routed_experts else samples(seed)
            if mode == "whole":
                metrics.append(harness.train(batch, version=seed))
            else:
                metrics.append(_in_blocks(harness, batch, seed, is_streamed=mode == "on"))
        tensors = _weights(harness)
        if harness.rank == 0:
            write(directory, f"{name}-{mode}", tensors, {"updates": metrics, "adds_output": _adds_output(harness)})
    if name.endswith("-overlap"):  # here an update in blocks and a whole one share Megatron's buckets
        harness.open(LAYOUTS[name])
        _in_blocks(harness, samples(0), 0, is_streamed=False)
        harness.train(samples(1), version=1)
        tensors = _weights(harness)
        if harness.rank == 0:
            write(directory, f"{name}-mixed", tensors, {})


def _cut(harness: MegatronHarness, batch: pa.Table) -> list[tuple[int, pa.Table]]:
    """Returns blocks of two groups, or of one if there are several mini-batches, each with its mini-batch's number."""
    num_minibatches = harness.config.num_minibatches
    size = len({*batch["group"].to_pylist()}) // num_minibatches
    cutter = BlockCutter(1 << 20, 2) if num_minibatches == 1 else BlockCutter(1)
    return [(block["group"][0].as_py() // size, block) for block in blocks_of(batch, cutter)]


def _in_blocks(harness: MegatronHarness, batch: pa.Table, version: int, *, is_streamed: bool) -> dict[str, float]:
    worker, blocks = harness.worker, _cut(harness, batch)
    begin = functools.partial(worker.begin_batch, role=Role.POLICY, temperature=TEMPERATURE, is_one_block=False)
    if is_streamed:  # begins with a stream that is lost
        begin()
        _add(harness, *blocks[1])
        _add(harness, *blocks[-1])
        worker.drop_batch(role=Role.POLICY)
    begin()
    for block in blocks:
        _add(harness, *block)
        if is_streamed:  # as for later groups
            harness.logprobs(batch)
            if harness.config.loss.kl_coef:
                harness.logprobs(batch, role="reference")
    counts: dict[int, list[np.ndarray]] = {}
    for number, block in blocks:
        counts.setdefault(number, []).append(trained_tokens(block))
    totals = [counts_of(np.concatenate(part)) for part in counts.values()]
    return worker.apply_batch(role=Role.POLICY, totals=totals, version=version).body["metrics"]


def _add(harness: MegatronHarness, minibatch: int, block: pa.Table) -> None:
    rows = {minibatch: np.arange(block.num_rows)}
    parts = train_parts(block, harness.config, harness._num_parts("policy"), Role.POLICY, rows)
    part = parts[harness._data_ranks["policy"]]
    harness.worker.add_block(role=Role.POLICY, **part.body, frames=part.frames)


def _adds_output(harness: MegatronHarness) -> bool:
    """Returns whether an output layer of this rank has added the last update's gradients to Megatron's sum itself."""
    if harness.config.strategy == "fsdp":
        return False
    named = (pair for chunk in harness.backend._model.bare_chunks() for pair in chunk.named_parameters())
    return any(getattr(weight, "grad_added_to_main_grad", False) for name, weight in named if "output_layer" in name)


def _weights(harness: MegatronHarness) -> dict[str, torch.Tensor]:
    """Returns the weights of the policy, and those of its adapters alone, on rank 0."""
    adapters = harness.backend.adapter() if harness.config.lora.rank else ()
    own = {f"adapter/{name}": tensor.clone() for name, tensor in adapters if tensor is not None}
    return harness.weights() | own


def main(directory: Path, names: Sequence[str]) -> int:
    """Runs the layouts of `names`; returns 0 if every rank came to its end, else 1."""
    for world in sorted({LAYOUTS[name].world for name in names}):
        mine = [name for name in names if LAYOUTS[name].world == world]
        if any(run_ranks(world, directory, functools.partial(run_all, directory=directory, names=mine, run=run))):
            return 1
    return 0
