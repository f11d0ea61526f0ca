"""Trains adapters on real ranks: Megatron in every layout, and FSDP.

One process imports everything and forks the ranks of one world after the other. They write their results to
DIRECTORY/NAME.{safetensors,json} and NAME-export.
"""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from services.trainer.checkpoint.manifest import begin
from tests.trainer.fsdp_harness import samples, write
from tests.trainer.megatron_harness import MegatronHarness, content, run_all, run_ranks
from tests.trainer.megatron_layouts import CP, OVERLAP, PP, TP, VPP, Layout

NUM_UPDATES = 2
RANK, ALPHA = 4, 8.0
LORA = {"rank": RANK, "alpha": ALPHA}
CANONICAL = LORA | {"kind": "canonical_lora"}
SOME = CANONICAL | {
    "target_modules": ["linear_q", "linear_v", "linear_fc1_up"],
    "exclude_modules": ["*.layers.0.mlp.*"],
}


def _layouts() -> Iterator[tuple[str, Layout]]:
    two = {"tp2": TP, "pp2": PP, "cp2": CP, "dp2": {}}
    cut = ["tp2", "pp2"]  # these depend on the matrices and not only on the batch
    for name, kind, lora, splits in (
        ("untied-lora", "untied", LORA, two),
        ("tied-canonical", "tied", CANONICAL, cut),
        ("moe-lora", "moe", LORA, two),
        ("phi3-lora", "phi3", LORA, cut),
        ("qwen2_moe-canonical", "qwen2_moe", CANONICAL, cut),
        ("deepseek_v3-lora", "deepseek_v3", LORA, cut),
        ("untied-canonical", "untied", CANONICAL, ["tp2"]),
        ("some", "untied", SOME, ["tp2", "pp2"]),
    ):
        yield f"{name}-1", _layout(kind, 1, {}, lora)
        yield f"{name}-fsdp1", _layout(kind, 1, {}, lora, strategy="fsdp")
        for split in splits:
            yield f"{name}-{split}", _layout(kind, 2, two[split], lora)
    yield "untied-lora-fsdp2", _layout("untied", 2, {}, LORA, strategy="fsdp")
    yield "some-fsdp2", _layout("untied", 2, {}, SOME, strategy="fsdp", gradient_checkpointing=True)
    yield "bfloat16-fsdp2", _layout("untied", 2, {}, CANONICAL, strategy="fsdp", compute_dtype="bfloat16")
    yield "untied-lora-dp2-overlap", _layout("untied", 2, OVERLAP, LORA)
    yield "untied-canonical-tp2-plain", _layout("untied", 2, TP | {"sequence_parallel": False}, CANONICAL)
    yield "tied-canonical-tp2-pp2", _layout("tied", 4, TP | PP, CANONICAL)
    yield "deep-lora-1", _layout("deep", 1, {}, LORA)
    yield "deep-lora-vpp2", _layout("deep", 2, PP | VPP, LORA)
    recompute = {"gradient_checkpointing": True}
    yield "untied-lora-1-recompute", _layout("untied", 1, {}, LORA, **recompute)
    yield "untied-lora-tp2-recompute", _layout("untied", 2, TP, LORA, **recompute)
    dropout = LORA | {"dropout": 0.5}
    yield "dropout-1", _layout("untied", 1, {}, dropout)
    yield "dropout-1-recompute", _layout("untied", 1, {}, dropout, **recompute)
    yield "dropout-tp2", _layout("untied", 2, TP, dropout)
    yield "dropout-tp2-plain", _layout("untied", 2, TP | {"sequence_parallel": False}, dropout)
    yield "bfloat16-1", _layout("untied", 1, {}, CANONICAL, compute_dtype="bfloat16")
    yield "reference-1", _layout("untied", 1, {}, LORA, loss={"kl_coef": 0.5, "entropy_coef": 0.5})
    both = {"loss": {"kl_coef": 0.5, "entropy_coef": 0.5}, "strategy": "fsdp"}
    yield "reference-fsdp1", _layout("untied", 1, {}, LORA, **both)


def _layout(kind: str, world: int, megatron: Mapping[str, Any], lora: Mapping[str, Any], **changes: Any) -> Layout:
    return Layout(kind, world, megatron, {"max_tokens_per_microbatch": 64, "lora": lora, **changes})


LAYOUTS = dict(_layouts())


# Only make test-long runs the other layouts: these have what they have, each together with something else.
LONG = LAYOUTS.keys() - {
    *("untied-lora-1", "untied-lora-tp2", "untied-lora-dp2", "untied-lora-fsdp1", "untied-lora-fsdp2"),
    *("moe-lora-1", "moe-lora-tp2", "moe-lora-fsdp1", "tied-canonical-1", "tied-canonical-tp2-pp2"),
    *("phi3-lora-tp2", "qwen2_moe-canonical-tp2", "deepseek_v3-lora-1", "deepseek_v3-lora-tp2", "deep-lora-vpp2"),
    *("some-1", "some-pp2", "some-fsdp2", "dropout-1", "dropout-1-recompute", "dropout-tp2-plain"),
    *("bfloat16-1", "reference-1", "reference-fsdp1"),
}

# Maps a layout to the one whose adapters it loads.
LOADS = {
    "untied-lora-tp2": "untied-lora-1",
    "untied-canonical-tp2": "untied-canonical-1",
    "some-pp2": "some-1",
    "untied-lora-fsdp2": "untied-lora-fsdp1",
}


def run(harness: MegatronHarness, name: str, directory: Path) -> None:
    """Writes log-probabilities, merged weights, base and adapters, before and after the updates, and the export."""
    harness.open(LAYOUTS[name])
    states = [_state(harness)]
    metrics = [harness.train(samples(seed), version=seed) for seed in range(NUM_UPDATES)]
    states.append(_state(harness))
    if harness.rank == 0:
        begin(directory / f"{name}-export")
        begin(directory / f"{name}-checkpoint")
    dist.barrier()
    harness.worker.export(path=str(directory / f"{name}-export"))
    if name in LOADS.values():
        state = {"version": NUM_UPDATES, "last_batch_id": "", "last_metrics": {}}
        harness.worker.save(path=str(directory / f"{name}-checkpoint"), state=state)
    reference = _rows(harness.logprobs(samples(), role="reference")) if harness.config.loss.kl_coef else []
    masks = _masks_agree(harness) if harness.config.lora.dropout else {}
    more = {"copies_agree": _copies(harness), "masks_agree": masks, "sends_merged": _sends_merged(harness)}
    if harness.rank == 0:
        for when, (tensors, logprobs) in zip(("before", "after"), states, strict=True):
            write(directory, f"{name}-{when}", tensors, {"logprobs": logprobs})
        write(directory, name, {}, {"updates": metrics, "reference": reference, **more})
    if name in LOADS:
        harness.backend.load(directory / f"{LOADS[name]}-checkpoint" / "state")
        tensors, _ = _state(harness)
        if harness.rank == 0:
            write(directory, f"{name}-loaded", tensors, {})


def _state(harness: MegatronHarness) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    backend = harness.backend
    parts = {"merged": backend.weights(), "base": backend.base(), "adapter": backend.adapter()}
    whole = ((f"{part}/{name}", tensor) for part, stream in parts.items() for name, tensor in stream)
    tensors = {name: tensor.clone() for name, tensor in whole if tensor is not None}  # on rank 0
    return tensors, _rows(harness.logprobs(samples()))


def _sends_merged(harness: MegatronHarness) -> bool:
    """Returns whether the merged weights that the ranks send are those that rank 0 exports."""
    if harness.config.strategy == "fsdp":
        return True
    merged = [(name, content(tensor)) for name, tensor in harness.weights().items() if tensor.numel()]
    sent = [(name, digest) for _, name, digest in harness.published()]
    return harness.rank != 0 or sorted(merged) == sorted(sent)


def _copies(harness: MegatronHarness) -> bool:
    """Returns whether a tensor-parallel group's ranks hold the same numbers in adapter matrices that are not cut."""
    if harness.config.strategy == "fsdp":
        return True
    parallelism = harness.backend._model.parallelism
    agree = torch.ones(())
    for chunk in harness.backend._model.bare_chunks():
        for name, parameter in chunk.named_parameters():
            if ".lora_" in name and not parameter.tensor_model_parallel:
                others = [torch.empty_like(parameter) for _ in range(parallelism.tp_index[1])]
                dist.all_gather(others, parameter.detach(), group=parallelism.tp_group)
                agree *= all(torch.equal(other, parameter) for other in others)
    dist.all_reduce(agree, op=dist.ReduceOp.MIN)
    return bool(agree)


def _masks_agree(harness: MegatronHarness) -> dict[str, bool]:
    """Returns by linear layer whether the tensor-parallel ranks drop the same places of their inputs."""
    group, agree = harness.backend._model.parallelism.tp_group, {}
    attention = harness.backend._model.bare_chunks()[0].train().decoder.layers[0].self_attention
    for name in ("linear_qkv", "linear_proj"):
        mask = getattr(attention, name)._dropped(torch.ones(256))
        others = [torch.empty_like(mask) for _ in range(group.size())]
        dist.all_gather(others, mask, group=group)
        agree[name] = all(torch.equal(other, mask) for other in others)
    return agree


def _rows(logprobs: list[np.ndarray]) -> list[list[float]]:
    return [row.tolist() for row in logprobs]


def main(directory: Path, names: list[str]) -> int:
    """Runs all ranks in the layouts `names`; returns 0 if every one came to its end, else 1."""
    for world in sorted({LAYOUTS[name].world for name in names}):
        mine = [name for name in names if LAYOUTS[name].world == world]
        if any(run_ranks(world, directory, functools.partial(run_all, directory=directory, names=mine, run=run))):
            return 1
    return 0
