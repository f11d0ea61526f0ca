"""Measures an update of the policy on SkyRL's published workload: seconds, tokens/s/GPU, MFU and memory.

`python -m benchmarks.train [NAME] [--only PATTERNS] [--samples N] [--repeats N] [--profile] [--directory DIR] [--tiny]`
runs the cases of benchmarks.train_cases that this host has enough GPUs for, with and without recompute, or the cases
that one of the comma-separated shell PATTERNS matches ("*3b fsdp 4 GPUs*"), and saves the result as NAME. `--tiny` is
for a machine without GPUs. `--profile` writes the slowest kernels of a short batch to DIR.

On n GPUs a case has n / 8 of the 2,560 sequences that SkyRL trains on 8 GPUs, so that seconds are comparable. If
`--samples` sets fewer sequences per GPU, the ratios of seconds to targets are scaled up by the number of sequences,
including the optimizer's time. Weights and tokens are random, so experts get about equal shares. Measurements are
written to DIR/results.jsonl immediately. Cases that were started there are not started again, so that after an
interruption or a failed case the same command continues with the remaining cases.

MFU is benchmarks.train_cases.forward_operations (three times that for an update) divided by seconds, GPUs and
989 TFLOP/s (dense bfloat16 of an H100 or H200). Recomputed operations do not count.
"""

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoConfig

from benchmarks.lengths import BLOCK
from benchmarks.megatron_layouts import MODELS, TINY
from benchmarks.report import keep
from benchmarks.train_cases import WORKLOADS, Case, cases, forward_operations, sample_lengths
from services.common.config.layout import Layout
from services.common.families.architecture import read_architecture

PEAK_FLOPS = 989e12

Samples = defaultdict[str, list[float]]


def main() -> None:
    """Writes model configs, runs one torchrun per number of GPUs, and reports, also after an interruption."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="train")
    parser.add_argument("--only", default="*")
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--directory", default="")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    num_gpus, patterns = torch.cuda.device_count() or 2, options.only.split(",")
    chosen = {
        name: case
        for name, case in cases()
        if case.world <= num_gpus and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    }
    plan = {
        "samples_per_gpu": options.samples or (10 if options.tiny else BLOCK),
        "repeats": options.repeats,
        "profile": options.profile,
        "tiny": options.tiny,
    }
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(options.directory or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for model in {case.model for case in chosen.values()}:
            _write_config(directory / model, is_tiny=options.tiny)
        try:
            _run(directory, plan, chosen)
        finally:
            _keep(options.name, directory, plan, chosen)
        if failed := [name for name in chosen if "train [s]" not in _measured(directory).get(name, ())]:
            sys.exit(f"benchmarks.train: not measured: {', '.join(failed)}")


def _write_config(path: Path, *, is_tiny: bool) -> None:
    kind, shape = MODELS[path.name]
    tiny = TINY | ({"num_experts": 8, "moe_intermediate_size": 32} if "num_experts" in shape else {})
    AutoConfig.for_model(kind, **shape | (tiny if is_tiny else {})).save_pretrained(path)


def _run(directory: Path, plan: dict[str, object], chosen: dict[str, Case]) -> None:
    """Runs all cases. A case that fails ends its processes, and new ones start with the case after it."""
    left = [name for name in chosen if name not in _measured(directory)]
    while left:
        world = chosen[left[0]].world
        now = [name for name in left if chosen[name].world == world]
        (directory / "plan.json").write_text(json.dumps(plan | {"cases": now}))
        launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m")
        command = [sys.executable, "-m", *launcher, "benchmarks.train_rank", str(directory)]
        if code := _finished(command):
            sys.stderr.write(f"benchmarks.train: {' '.join(command)} ended with {code}\n")
        begun = set(_measured(directory)) & set(now) or set(now)
        left = [name for name in left if name not in begun]


def _finished(command: list[str]) -> int:
    """Runs torchrun and returns its exit code. An interruption ends torchrun and its ranks in order."""
    with subprocess.Popen(command) as torchrun:
        try:
            return torchrun.wait()
        except BaseException:
            torchrun.terminate()
            torchrun.wait()
            raise


def _measured(directory: Path) -> dict[str, Samples]:
    """Returns the raw values of each quantity of each case that was started."""
    measured: dict[str, Samples] = {}
    path = directory / "results.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        samples = measured.setdefault(entry["case"], defaultdict(list))
        for quantity, value in entry["measured"].items():
            samples[quantity].append(value)
    return measured


def _keep(name: str, directory: Path, plan: dict[str, object], chosen: dict[str, Case]) -> None:
    kept: dict[str, list[float]] = {}
    speeds: dict[str, float] = {}
    known = dict(cases())
    measured = _measured(directory)
    for case_name in dict.fromkeys([*chosen, *measured]):
        samples, case = measured.get(case_name, Samples(list)), known[case_name]
        if "train [s]" not in samples:
            kept[f"{case_name}: not measured"] = [1]
            continue
        _derive(samples, case, directory / case.model, is_tiny=bool(plan["tiny"]))
        speeds[case_name] = max(samples["updates: tokens/s/GPU"])
        kept |= {f"{case_name}: {quantity}": values for quantity, values in samples.items()}
    for case_name, speed in speeds.items():
        one = case_name.replace(f" {known[case_name].world} GPUs", " 1 GPUs")
        if one in speeds:
            kept[f"{case_name}: tokens/s/GPU over those on 1 GPU"] = [speed / speeds[one]]
    models = {known[case_name].model for case_name in speeds}
    keep(
        name,
        kept,
        libraries=("torch", "transformers", "megatron-core"),
        weights="random",
        plan=plan,
        share="a case on n GPUs has n / 8 of SkyRL's 2,560 sequences, and is held to the targets for 8 GPUs",
        models={model: MODELS[model] for model in models},
        workloads={model: vars(WORKLOADS[model]) for model in models},
        cases={case_name: vars(known[case_name]) for case_name in speeds},
    )


def _derive(samples: Samples, case: Case, model: Path, *, is_tiny: bool) -> None:
    """Adds the quantities that follow from the seconds of each repeat."""
    workload, world, per_gpu = WORKLOADS[case.model], case.world, int(samples["samples per GPU"][0])
    pairs = sample_lengths(case.model, per_gpu * world, is_tiny=is_tiny)
    num_tokens, architecture = int(pairs.sum()), read_architecture(model)
    operations = forward_operations(architecture, pairs.sum(1)) / (world * PEAK_FLOPS)
    align = Layout.of(case.config.megatron, world).align if case.strategy == "megatron" else 1
    padded = int((-(-(pairs.sum(1) - 1) // align) * align).sum())
    samples["padding share"].append(1 - (num_tokens - len(pairs)) / padded)
    samples["tokens"].append(num_tokens)
    for reference, train, policy in zip(
        samples["reference forward [s]"], samples["train [s]"], samples["train: policy forward [s]"], strict=True
    ):
        updates, forwards = train - policy, reference + policy
        samples["updates [s]"].append(updates)
        samples["updates: MFU"].append(3 * operations / updates)
        samples["updates: tokens/s/GPU"].append(num_tokens / world / updates)
        samples["updates: seconds over the target"].append(updates * BLOCK / per_gpu / workload.train_target_s)
        samples["reference forward: MFU"].append(operations / reference)
        samples["reference forward: tokens/s/GPU"].append(num_tokens / world / reference)
        samples["both forwards [s]"].append(forwards)
        samples["both forwards: seconds over the target"].append(forwards * BLOCK / per_gpu / workload.forward_target_s)


if __name__ == "__main__":
    main()
