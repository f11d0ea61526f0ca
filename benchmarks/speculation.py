"""Compares the rollout service's engine with and without speculative decoding, on repetitive and on random text.

`python -m benchmarks.speculation NAME SHAPE [--kind ngram] [--concurrency 64,512] [--repeats 3] [--num-tokens 4]
[--tiny]`

SHAPE is one of benchmarks.megatron_layouts.MODELS. It needs one GPU, or none with `--tiny`. The model's distribution is
made up (benchmarks.speculation_engine), so that the acceptance is known: this shows the cost of a step with drafted
tokens, and not how many tokens of a real policy would be accepted. It also compares the samples: the share of
successors must be the same with and without speculation, up to chance.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.report import keep

_LARGEST_Z = 5.0
"""Samples of the same distribution differ by more standard errors in one of two million comparisons."""


def sampled(directory: Path, options: argparse.Namespace, speculation: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the measurements of one engine, in a process of its own."""
    prompt_tokens, max_tokens = (16, 48) if options.tiny else (64, 256)
    settings = {
        "shape": options.shape,
        "is_tiny": options.tiny,
        "concurrency": options.concurrency,
        "repeats": options.repeats,
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "rollout": {
            "max_model_len": prompt_tokens + max_tokens + 2 * options.num_tokens,
            "max_samples": max(options.concurrency),
            "speculation": speculation,
            "engine": {} if options.tiny else {"gpu_memory_utilization": 0.5},
        },
    }
    (directory / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "benchmarks.speculation_engine"]
    names = ("model", "settings.json", "result.json")
    subprocess.run([*command, *(str(directory / name) for name in names)], check=True)
    return json.loads((directory / "result.json").read_text())


def compare(without: dict[str, Any], speculating: dict[str, Any], num_tokens: int) -> dict[str, list[float]]:
    """Returns the numbers of both by quantity, with their ratios."""
    quantities: dict[str, list[float]] = defaultdict(list)
    for label, plain in without.items():
        for off, on in zip(plain, speculating[label], strict=True):
            quantities[f"{label}: tokens/s without"].append(off["tokens/s"])
            quantities[f"{label}: tokens/s with"].append(on["tokens/s"])
            quantities[f"{label}: tokens/s with over without"].append(on["tokens/s"] / off["tokens/s"])
            if on["num_drafts"]:
                quantities[f"{label}: accepted for each draft"].append(on["num_accepted"] / on["num_drafts"])
                quantities[f"{label}: looking for drafts [s]"].append(on["seconds"])
            for name in ("successors", "mean log-probability"):
                quantities[f"{label}: {name} without"].append(off[name])
                quantities[f"{label}: {name} with"].append(on[name])
        shares = [sum(batch["successors"] for batch in batches) / len(plain) for batches in (plain, speculating[label])]
        error = math.sqrt(sum(share * (1 - share) for share in shares) / (num_tokens * len(plain) * _at_once(label)))
        z = (shares[1] - shares[0]) / error if error else 0.0
        quantities[f"{label}: difference of the shares of successors [standard errors]"].append(z)
    return quantities


def _at_once(label: str) -> int:
    return int(label.split(", ")[1].split()[0])


def parse() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation")
    parser.add_argument("name", help="name of the result")
    parser.add_argument("shape", help="one of benchmarks.megatron_layouts.MODELS")
    parser.add_argument("--concurrency", type=lambda text: [int(part) for part in text.split(",")], default="64,512")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kind", choices=("ngram", "suffix"), default="ngram", help="rollout.speculation.kind")
    parser.add_argument("--num-tokens", type=int, default=4, help="rollout.speculation.num_tokens")
    parser.add_argument("--tiny", action="store_true", help="use a small model and short samples, for CPU")
    return parser.parse_args()


def main() -> None:
    """Measures both engines and saves the result.

    Raises:
        SystemExit: Speculation changed what is sampled.
    """
    options = parse()
    speculation = {"kind": options.kind, "num_tokens": options.num_tokens}
    with tempfile.TemporaryDirectory() as directory:
        without = sampled(Path(directory), options, None)
        speculating = sampled(Path(directory), options, speculation)
    quantities = compare(without, speculating, 48 if options.tiny else 256)
    settings = {"shape": options.shape, "is_tiny": options.tiny, "speculation": speculation}
    keep(options.name, quantities, libraries=("torch", "vllm"), **settings)
    changed = [label for label, values in quantities.items() if "errors]" in label and abs(values[0]) > _LARGEST_Z]
    if changed:
        raise SystemExit(f"speculation changed what is sampled: {', '.join(changed)}")


if __name__ == "__main__":
    main()
