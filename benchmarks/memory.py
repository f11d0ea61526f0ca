"""Compares `lockstep plan`'s estimates with the peaks of real trainer ranks on CPU, phase by phase.

`python -m benchmarks.memory [NAME] [--only PATTERNS] [--repeats N]` starts the ranks of each layout as the trainer does
and measures each phase with `benchmarks.memory_rank`. The model is random, and small enough for two ranks in 4 GiB;
its activations and logits need more than the process itself. All samples are equally long, as the estimates assume.

A peak is that of the rank that needs most, in the last repeat, when the optimizer's state exists.
"""

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.report import keep
from services.common.config.layout import data_parallel_size
from services.common.config.run import Config
from services.common.families.architecture import read_architecture
from services.coordinator.planning.memory import Memory, rank_memory

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
PROMPT_TOKENS, COMPLETION_TOKENS, NUM_SAMPLES = 16, 496, 8
BUCKET_BYTES = 64 << 20
PHASES = ("forward", "backward", "optimizer", "publication")


@dataclass(frozen=True)
class Case:
    """Describes a layout: settings of the trainer, whose micro-batches are two or more."""

    num_ranks: int
    max_tokens: int
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """Returns a run's config with these settings, for an estimate."""
        trainer = {"num_ranks": self.num_ranks, "max_tokens_per_microbatch": self.max_tokens, "max_logprob_diff": 1e9}
        tree = {
            "model": "random",
            "data": {"train": "none", "prompts_per_step": NUM_SAMPLES // 2, "max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {
                "completions_per_prompt": 2,
                "max_model_len": PROMPT_TOKENS + COMPLETION_TOKENS,
                "sampling": {"max_tokens": COMPLETION_TOKENS},
            },
            "reward": {"scorers": [{"kind": "exact"}]},
            "weights": {"bucket_bytes": BUCKET_BYTES},
            "trainer": trainer | {"compute_dtype": "float32"} | dict(self.trainer),
        }
        return Config.model_validate(tree)


_MEGATRON: dict[str, Any] = {"strategy": "megatron"}
_TP2 = {**_MEGATRON, "megatron": {"tensor_model_parallel_size": 2}}
_PP2 = {**_MEGATRON, "megatron": {"pipeline_model_parallel_size": 2}}
_RECOMPUTE = {"gradient_checkpointing": True}
CASES = {
    "fsdp 1 rank": Case(1, 2048),
    "megatron TP2": Case(2, 2048, _TP2),
    "fsdp 2 ranks": Case(2, 1024),
    "fsdp 1 rank, recompute": Case(1, 2048, _RECOMPUTE),
    "megatron PP2": Case(2, 2048, _PP2),
    "megatron DP2": Case(2, 1024, _MEGATRON),
    "megatron 1 rank, LoRA": Case(1, 2048, _MEGATRON | {"lora": {"rank": 8}}),
    "fsdp 1 rank, 512 tokens": Case(1, 512),
    "megatron 1 rank": Case(1, 2048, _MEGATRON),
    "megatron 1 rank, recompute": Case(1, 2048, _MEGATRON | _RECOMPUTE),
}


def make_model(directory: Path) -> Path:
    """Writes the random model."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE)).save_pretrained(directory)
    return directory


def measure(case: Case, model: Path, directory: Path, *, repeats: int = 2) -> list[dict[str, list[int]]]:
    """Returns the peaks of each phase of each rank, in bytes.

    Raises:
        CalledProcessError: A rank failed.
    """
    directory.mkdir()
    (directory / "model").symlink_to(model)
    content = {
        "trainer": case.config.trainer.model_dump(mode="json"),
        "data_ranks": data_parallel_size(case.config.trainer),
        "samples": NUM_SAMPLES,
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": COMPLETION_TOKENS,
        "bucket_bytes": BUCKET_BYTES,
        "repeats": repeats,
    }
    (directory / "case.json").write_text(json.dumps(content))
    subprocess.run([sys.executable, "-m", "benchmarks.memory_rank", str(directory)], check=True)
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(case.num_ranks)]


def estimates(case: Case, model: Path) -> list[Memory]:
    """Returns the estimate of each pipeline stage."""
    return list(rank_memory(case.config, read_architecture(model), is_gpu=False).values())


def compare(measured: list[dict[str, list[int]]], estimated: list[Memory]) -> dict[str, tuple[list[int], int]]:
    """Returns (measured in each repeat, estimated) bytes of each phase, of the ranks that need most."""
    compared: dict[str, tuple[list[int], int]] = {}
    for phase in PHASES:
        of_ranks = [rank[phase] for rank in measured]
        most = [max(values) for values in zip(*of_ranks, strict=True)]
        compared[phase] = (most, max(memory.phases[phase] for memory in estimated))
    peaks = [max(values) for values in zip(*(values for values, _ in compared.values()), strict=True)]
    compared["peak"] = (peaks, max(memory.peak for memory in estimated))
    return compared


def main() -> None:
    """Measures the cases; saves their peaks, the estimates and the ratios after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="memory-cpu")
    parser.add_argument("--only", default="*")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        model = make_model(Path(temporary) / "model")
        for number, (name, case) in enumerate(CASES.items()):
            if not any(fnmatch.fnmatch(name, pattern) for pattern in options.only.split(";")):
                continue
            measured = measure(case, model, Path(temporary) / str(number), repeats=options.repeats)
            samples[f"{name}: before the model [MiB]"] = [rank["imports"][0] / 2**20 for rank in measured]
            for phase, (values, estimated) in compare(measured, estimates(case, model)).items():
                samples[f"{name}: {phase} [MiB]"] = [value / 2**20 for value in values]
                samples[f"{name}: {phase}, estimated [MiB]"] = [estimated / 2**20]
                samples[f"{name}: {phase}, estimated over measured"] = [estimated / values[-1]]
            _keep(options.name, samples)


def _keep(name: str, samples: dict[str, list[float]]) -> None:
    """Saves what was measured so far."""
    cases = {case: {"num_ranks": c.num_ranks, "max_tokens": c.max_tokens, **c.trainer} for case, c in CASES.items()}
    libraries = ("torch", "transformers", "megatron-core")
    keep(name, samples, libraries=libraries, model=SHAPE, cases=cases, samples_per_step=NUM_SAMPLES)


if __name__ == "__main__":
    main()
