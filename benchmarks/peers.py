"""Measures TRL's GRPO on one GPU with the workload of `benchmarks.colocated`, to compare seconds per step.

Run `python -m benchmarks.peers NAME SHAPE [--setting SETTING ...] [--steps N]` on the host and in the hour of the
colocated benchmark, with trl, datasets, liger-kernel and what they need installed. SHAPE is one of
benchmarks.megatron_layouts.MODELS. Each of SETTINGS runs in a process of its own: vLLM in TRL's process, the same
prompts, 512 samples a step in groups of 8, the same lengths (205 tokens on average, or 819 with `--shorter-by 1`), one
optimizer step for each batch, AdamW, bfloat16 computation and float32 weights. With `--lora-rank R`, which needs peft,
the weights are bfloat16 and only adapters are trained. Rewards are random.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired, run
from typing import Any

import psutil

from benchmarks.lengths import BLOCK, MAX_TOKENS, NUM_BLOCKS, PROMPT_TOKENS, read_lengths
from benchmarks.random_model import add_options, make_random_model
from benchmarks.report import keep
from benchmarks.step import TOKENIZER

_SLEEPS = {"use_liger_kernel": True, "vllm_enable_sleep_mode": True}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "defaults, 16 samples": {"per_device_train_batch_size": 16},
    "Liger, 16 samples": {"per_device_train_batch_size": 16, "use_liger_kernel": True},
    "Liger, 32 samples, vLLM sleeps": {"per_device_train_batch_size": 32, **_SLEEPS},
    "Liger, 64 samples, vLLM sleeps, checkpointing": {
        "per_device_train_batch_size": 64,
        **_SLEEPS,
        "gradient_checkpointing": True,
    },
    # For completions of 819 tokens: a sleeping engine can have more of the GPU for the cache of its keys and values.
    "Liger, 8 samples, vLLM sleeps and has 0.7": {
        "per_device_train_batch_size": 8,
        **_SLEEPS,
        "vllm_gpu_memory_utilization": 0.7,
    },
    "Liger, 32 samples, vLLM sleeps and has 0.7, checkpointing": {
        "per_device_train_batch_size": 32,
        **_SLEEPS,
        "vllm_gpu_memory_utilization": 0.7,
        "gradient_checkpointing": True,
    },
    # For weights of 16 GB beside it.
    **{
        f"Liger, {samples} samples, vLLM sleeps and has 0.5, checkpointing": {
            "per_device_train_batch_size": samples,
            **_SLEEPS,
            "vllm_gpu_memory_utilization": 0.5,
            "gradient_checkpointing": True,
        }
        for samples in (8, 16, 32)
    },
}
_SAMPLES, _GROUP, _MEAN = 512, 8, 819
_TIMEOUT_S = 900.0
_WARM_UP = 1


def scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """Returns vLLM's scheduler, which ends requests at the fixture's lengths, in the order in which they come."""
    from services.rollout.compat.scheduler import kind_of

    made = kind_of(vllm_config)(vllm_config=vllm_config, **arguments)
    shorter_by = vllm_config.additional_config["shorter_by"]
    lengths = [max(1, length // shorter_by) for length in read_lengths(_MEAN, BLOCK * NUM_BLOCKS)]
    add_request, num_requests = made.add_request, 0

    def add_shortened(request: Any) -> None:
        nonlocal num_requests
        request.max_tokens = min(lengths[num_requests % len(lengths)], request.max_tokens)
        num_requests += 1
        add_request(request)

    made.add_request = add_shortened
    return made


def adapters(rank: int) -> Mapping[str, Any]:
    """Returns what tells TRL to train adapters of `rank`; nothing if that is 0."""
    if not rank:
        return {}
    from peft import LoraConfig  # pyright: ignore[reportMissingImports]

    return {"peft_config": LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")}


def train(options: argparse.Namespace) -> None:
    """Trains the model in directory `options.shape` with TRL in this process, and writes the seconds of each step."""
    import functools

    import pyarrow.parquet as pq
    import trl.generation.vllm_generation as generation  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    started = psutil.Process().create_time()
    settings, out = SETTINGS[options.setting[0]], options.train
    max_tokens = (MAX_TOKENS - PROMPT_TOKENS) // options.shorter_by
    own = {"scheduler_cls": "benchmarks.peers.scheduler", "additional_config": {"shorter_by": options.shorter_by}}
    generation.LLM = functools.partial(generation.LLM, **own)
    rows = pq.read_table("data/arithmetic/train.parquet").to_pylist()
    samples: dict[str, list[float]] = defaultdict(list)

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin = time.time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            samples["step [s]"].append(time.time() - self.begin)
            if len(samples["step [s]"]) == 1:
                samples["first update [s]"].append(time.time() - started)
            out.write_text(json.dumps(samples))

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        samples["sampled [tokens]"].append(sum(map(len, completion_ids)))
        return [random.random() for _ in completion_ids]

    size = settings["per_device_train_batch_size"]
    config = GRPOConfig(
        output_dir=str(out.with_suffix("")),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=max_tokens + PROMPT_TOKENS,
        gradient_accumulation_steps=_SAMPLES // size,
        num_generations=_GROUP,
        max_completion_length=max_tokens,
        max_steps=options.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        temperature=1.0,
        beta=0.0,
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16" if options.lora_rank else "float32"},
        generation_kwargs={"ignore_eos": True},
        **{"gradient_checkpointing": False, "vllm_gpu_memory_utilization": 0.4, **settings},
    )
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    parts = {"reward_funcs": reward, "args": config, "train_dataset": data, "callbacks": [Clock()]}
    GRPOTrainer(model=options.shape, **parts, **adapters(options.lora_rank)).train()


def make_parser(prog: str, settings: Iterable[str]) -> argparse.ArgumentParser:
    """Returns a parser of what the benchmark of every peer takes; `settings` are the names of its settings."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("name")
    parser.add_argument("shape")
    parser.add_argument("--setting", action="append", choices=settings)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shorter-by", type=int, default=4, help="divide the lengths of the fixture by this")
    add_options(parser)
    return parser


def main() -> None:
    """Makes the model, runs every setting, and saves the result. With `--train` it is the process of one setting."""
    parser = make_parser("python -m benchmarks.peers", SETTINGS)
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options)
        return
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        model = make_random_model(Path(name), options.shape, options)
        for file in TOKENIZER:
            shutil.copy(Path("deploy/quickstart/model") / file, model)
        for number, setting in enumerate(options.setting or SETTINGS):
            out = Path(name) / f"{number}.json"
            command = [sys.executable, "-m", "benchmarks.peers", options.name, str(model)]
            command += ["--setting", setting, "--steps", str(options.steps), "--train", str(out)]
            command += ["--shorter-by", str(options.shorter_by), "--lora-rank", str(options.lora_rank)]
            # What does not fit has no samples, and what takes too long those of its finished steps. Lockstep's own
            # changes of vLLM are not for TRL.
            with suppress(TimeoutExpired):
                run(command, timeout=_TIMEOUT_S, check=False, env={**os.environ, "VLLM_PLUGINS": ""})
            found = json.loads(out.read_text()) if out.exists() else {}
            for quantity, values in found.items():
                after = values if quantity == "first update [s]" else values[_WARM_UP:]
                if after:
                    samples[f"TRL, {setting}: {quantity}"] = after
    libraries = [
        "trl",
        "liger-kernel",
        "torch",
        "vllm",
        "transformers",
        "datasets",
        *["peft"] * bool(options.lora_rank),
    ]
    workload = {"shorter_by": options.shorter_by, "lora_rank": options.lora_rank}
    keep(options.name, samples, libraries=libraries, shape=options.shape, settings=dict(SETTINGS), **workload)


if __name__ == "__main__":
    main()
