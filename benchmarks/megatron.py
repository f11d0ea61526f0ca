"""Compares Megatron's layouts on this host's GPUs: log-probabilities with transformers, gradient norms with one GPU.

`python -m benchmarks.megatron [NAME] [--tiny] [--only WORDS] [--directory DIR]` runs every layout that this host has
enough GPUs for, or those whose names contain one of the comma-separated WORDS, and saves the result as NAME. Models
have real shapes and random weights; `--tiny` is for a machine without GPUs. Each layout's result is written to DIR as
soon as it is measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.megatron_layouts import MODELS, Layout, layouts
from benchmarks.report import keep


def main() -> None:
    """Makes models and references, runs one torchrun per number of GPUs, and compares the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="megatron-layouts")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--directory", default="")
    options = parser.parse_args()
    num_gpus = torch.cuda.device_count() or 4
    words = options.only.split(",")
    chosen = {name: x for name, x in layouts() if x.world <= num_gpus and any(word in name for word in words)}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(options.directory or temporary)
        (directory / "layouts.json").write_text(json.dumps(list(chosen)))
        for model in {layout.model for layout in chosen.values()}:
            _run("benchmarks.megatron_model", str(directory), model, *(["tiny"] if options.tiny else []))
        for world, model in dict.fromkeys((layout.world, layout.model) for layout in chosen.values()):
            launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m")
            _run(*launcher, "benchmarks.megatron_rank", str(directory), model)
            _keep(options.name, directory, chosen)


def _run(*command: str) -> None:
    """Runs a command, and continues after a failure with the results so far, because time on a GPU host is limited."""
    code = subprocess.run([sys.executable, "-m", *command]).returncode
    if code:
        sys.stderr.write(f"benchmarks.megatron: {' '.join(command)} ended with {code}\n")


def _keep(name: str, directory: Path, chosen: dict[str, Layout]) -> None:
    kept: dict[str, list[float]] = {}
    norms: dict[str, float] = {}
    saved: dict[str, list[list[float]]] = {}
    for layout_name, layout in chosen.items():
        path = directory / f"{layout_name}.json"
        if not path.exists():
            kept[f"{layout_name}: failed"] = [1]
            continue
        result = json.loads(path.read_text())
        logprobs = result.pop("logprobs")
        saved = saved | {layout.model: result.pop("logprobs saved")} if layout.saves else saved
        reference = directory / f"{layout.model}.logprobs.json"
        if layout.loads:
            result |= _gap("saved", logprobs, saved[layout.model])
        elif reference.exists():
            result |= _gap("transformers", logprobs, json.loads(reference.read_text()))
        if not layout.loads:
            one = norms.setdefault(layout.like, result["grad_norm"])
            result["grad norm over that of 1 GPU, minus 1"] = result["grad_norm"] / one - 1
        kept |= {f"{layout_name}: {quantity}": [value] for quantity, value in result.items()}
    libraries = ("torch", "transformers", "megatron-core")
    keep(name, kept, libraries=libraries, weights="random", batch="32 samples, 64-128 + 128-512 tokens", models=MODELS)


def _gap(what: str, logprobs: list[list[float]], reference: list[list[float]]) -> dict[str, float]:
    gaps = np.concatenate([np.abs(np.array(a) - np.array(b)) for a, b in zip(logprobs, reference, strict=True)])
    return {f"|logprob - {what}| mean": float(gaps.mean()), f"|logprob - {what}| max": float(gaps.max())}


if __name__ == "__main__":
    main()
