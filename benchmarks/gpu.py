"""Runs all benchmarks of real model shapes that this host has enough GPUs for, and saves each result under its name.

Run `python -m benchmarks.gpu [PATTERNS] [--list] [--limit-s 900]`, with comma-separated shell PATTERNS of names such as
`sync*,step-qwen3-8b*`. `--list` only shows the commands. A benchmark that fails or exceeds the limit does not stop the
others. Sizes are for GPUs with the memory of an H200. Each model is made once and shared, in a temporary folder
(TMPDIR) that needs 36 GB for two GPUs, 57 GB for four and 118 GB for eight. step and loop need data/arithmetic, which
`make run` makes.
"""

import argparse
import contextlib
import fnmatch
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
from rich.console import Console

_GRACE_S = 60.0
_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # vLLM cannot sleep with it, as `colocated` needs
_WITH_MODEL = ("sync", "step", "rollout", "colocated", "routing")
_BF16 = "trainer.strategy=megatron trainer.compute_dtype=bfloat16"
_SYNC = "rollout.engine.gpu_memory_utilization=0.5 rollout.engine.enforce_eager=true"
_STEP = "rollout.engine.gpu_memory_utilization=0.8 rollout.engine.additional_config.shorter_by=4"
# Makes 8 billion weights with their gradients, float32 moments and activations fit one GPU, which is then almost full.
_FITS = (
    "trainer.max_tokens_per_microbatch=5120 "
    "'trainer.megatron.ddp_config={grad_reduce_in_fp32: false}' trainer.megatron.fully_reshardable=false "
    "'trainer.megatron.optimizer_config_kwargs={use_precision_aware_optimizer: true, main_grads_dtype: bf16}'"
)
# Random weights have large logits, whose rounding to float8 is far above what a trained model has.
_FP8 = "rollout.precision=fp8 trainer.loss.correction.weight=token trainer.max_logprob_diff=5"
_LAG = "trainer.lag.versions=1 trainer.loss.old_logprobs=engine"


def commands() -> Iterator[tuple[int, str]]:
    """Yields each benchmark's number of GPUs, and its command as `MODULE NAME ARGUMENTS`."""
    for world in (1, 2, 4, 8):
        dense = ",".join(f"qwen2.5-?b {strategy} {world} GPUs*" for strategy in ("megatron", "fsdp"))
        yield world, f"train train-dense-{world} --only '{dense}'"
        yield world, f"train train-experts-{world} --only '*a3b*{world} GPUs*'"
    yield 1, "routing routing-qwen3-a3b-8-layers qwen3-a3b-8-layers"
    yield 1, "speculation speculation-qwen3-0.6b qwen3-0.6b"
    yield 1, "speculation speculation-suffix-qwen3-0.6b qwen3-0.6b --kind suffix"
    yield from _publications()
    yield from _rollouts()
    yield from _colocated()
    for each in (1, 2, 4):
        both = f"trainer.num_ranks={each} rollout.num_replicas={each} rollout.sampling.max_tokens=1024 num_steps=8"
        yield 2 * each, f"step step-qwen3-0.6b-{each}to{each} qwen3-0.6b {_BF16} {_STEP} {both}"
        yield 2 * each, f"step step-qwen3-8b-{each}to{each} qwen3-8b {_BF16} {_STEP} {both} {_FITS}"
        yield 2 * each, f"step step-qwen3-8b-{each}to{each}-lag1 qwen3-8b {_BF16} {_STEP} {both} {_FITS} {_LAG}"
    loop = "num_steps=60 evaluation.eval_freq=20 trainer.num_ranks=1 rollout.num_replicas=1"
    yield 2, f"loop loop-gpu {loop} rollout.engine.gpu_memory_utilization=0.4 rollout.engine.enforce_eager=true"


def _publications() -> Iterator[tuple[int, str]]:
    one = f"{_SYNC} trainer.num_ranks=1 rollout.num_replicas=1"
    yield 2, f"sync sync-qwen3-0.6b-1to1-fsdp qwen3-0.6b {one}"
    yield 2, f"sync sync-qwen3-0.6b-1to1 qwen3-0.6b {_BF16} {one}"
    yield 2, f"sync sync-qwen3-8b-1to1 qwen3-8b {_BF16} {one}"
    yield 2, f"sync sync-qwen3-8b-1to1-fp8 qwen3-8b {_BF16} {one} {_FP8}"
    yield 2, f"sync sync-qwen3-8b-1to1-without-digest qwen3-8b {_BF16} {one} --without-digest"
    yield 2, f"sync sync-qwen3-a3b-4-layers-1to1 qwen3-a3b-4-layers {_BF16} {one}"
    for shape in ("qwen3-0.6b", "qwen3-8b"):
        beside = f"{one} placement=colocated rollout.engine.gpu_memory_utilization=0.3"  # the trainer keeps its memory
        yield 1, f"sync sync-{shape}-pair {shape} {_BF16} {beside}"
        yield 1, f"sync sync-{shape}-pair-fp8 {shape} {_BF16} {beside} {_FP8}"
    for each, experts in ((2, "qwen3-a3b-16-layers"), (4, "qwen3-a3b-16-layers"), (4, "qwen3-30b-a3b")):
        both = f"{_BF16} {_SYNC} trainer.num_ranks={each} rollout.num_replicas={each}"
        ep = f"trainer.megatron.expert_model_parallel_size={each}"
        yield 2 * each, f"sync sync-{experts}-{each}to{each}-ep{each} {experts} {both} {ep}"
    for each in (2, 4):
        both = f"{_BF16} {_SYNC} trainer.num_ranks={each} rollout.num_replicas={each}"
        tp = f"trainer.megatron.tensor_model_parallel_size={each} trainer.megatron.sequence_parallel=true"
        yield 2 * each, f"sync sync-qwen3-8b-{each}to{each}-tp{each} qwen3-8b {both} {tp}"


def _colocated() -> Iterator[tuple[int, str]]:
    short = "rollout.sampling.max_tokens=1024 rollout.engine.additional_config.shorter_by=4"
    for strategy in ("fsdp", "megatron"):
        both = f"trainer.strategy={strategy} trainer.compute_dtype=bfloat16 {short}"
        both += " trainer.fsdp.torch_compile=true" if strategy == "fsdp" else ""
        yield 1, f"colocated colocated-qwen3-0.6b-{strategy} qwen3-0.6b {both}"
    yield 1, f"colocated colocated-qwen2.5-3b-megatron qwen2.5-3b {_BF16} {short}"
    for mode in ("on", "off"):
        engine = "rollout.engine.enforce_eager=true rollout.engine.gpu_memory_utilization=0.2"
        routed_experts = f"trainer.moe.router_replay={mode} {engine} rollout.sampling.max_tokens=512"
        yield 1, f"colocated routing-megatron-a3b-4-layers-{mode} qwen3-a3b-4-layers {_BF16} {routed_experts}"
    lora = "trainer.lora.rank=32 trainer.gradient_checkpointing=true trainer.max_tokens_per_microbatch=8192"
    yield 1, f"colocated colocated-qwen3-8b-lora qwen3-8b {_BF16} {short} {lora}"
    yield 1, f"colocated colocated-qwen3-8b-lora-fp8 qwen3-8b {_BF16} {short} {lora} {_FP8}"
    cache = f"{_FP8} rollout.kv_cache_dtype=fp8"
    yield 1, f"colocated colocated-qwen3-8b-lora-fp8-kv-cache qwen3-8b {_BF16} {short} {lora} {cache}"
    yield 1, f"colocated colocated-qwen3-8b-full qwen3-8b {_BF16} {short} {_FITS} trainer.gradient_checkpointing=true"
    both = f"trainer.num_ranks=2 rollout.num_replicas=2 {short}"
    yield 2, f"colocated colocated-qwen3-0.6b-2gpus qwen3-0.6b {_BF16} {both}"


def _rollouts() -> Iterator[tuple[int, str]]:
    # Two engines share a GPU, or an engine shares it with the idle trainer.
    engine = f"{_BF16} rollout.engine.gpu_memory_utilization=0.3 rollout.engine.kv_cache_memory_bytes"
    small, large = f"{engine}={85 << 30} --bare-gpu 0", f"{engine}={44 << 30}"
    half, quarter = (f"rollout.engine.additional_config.shorter_by={by}" for by in (2, 4))
    yield 2, f"rollout rollout-qwen3-0.6b-512 qwen3-0.6b --concurrency 512 --repeats 5 {small} {half}"
    yield 2, f"rollout rollout-qwen3-0.6b qwen3-0.6b --concurrency 1024,2048 --repeats 3 {small} {quarter}"
    yield 2, f"rollout rollout-qwen2.5-7b qwen2.5-7b --concurrency 512,1024,2048 --repeats 3 {large} {quarter}"
    tail = f"--no-bare --concurrency 1024,2560 --repeats 3 rollout.num_replicas=2 {_BF16} {half}"
    for most in (64, 128, 256):
        yield 3, f"rollout rollout-tail-{most} qwen3-0.6b rollout.max_samples={most} {tail}"


def main() -> None:
    """Runs the chosen benchmarks and prints how each ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("patterns", nargs="?", default="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--limit-s", type=float, default=900)
    options = parser.parse_args()
    num_gpus, console, failed = torch.cuda.device_count(), Console(soft_wrap=True), 0
    with tempfile.TemporaryDirectory() as models:
        for needed, command in commands():
            module, *arguments = shlex.split(command)
            if not any(fnmatch.fnmatch(arguments[0], pattern) for pattern in options.patterns.split(",")):
                continue
            if options.list or needed > num_gpus:
                console.print(f"{needed} GPUs: python -m benchmarks.{command}", markup=False, highlight=False)
                continue
            kept = ["--models", models] if module in _WITH_MODEL else []
            failed += not _run(
                [sys.executable, "-m", f"benchmarks.{module}", *arguments, *kept], options.limit_s, console
            )
    sys.exit(1 if failed else 0)


def _run(command: list[str], limit_s: float, console: Console) -> bool:
    begin = time.monotonic()
    environment = os.environ | (_ALLOCATOR if command[2] == "benchmarks.step" else {})
    with subprocess.Popen(command, start_new_session=True, env=environment) as running:
        try:
            outcome = _outcome(running, limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the session is empty, torchrun's ranks included
                os.killpg(running.pid, signal.SIGKILL)
    console.print(f"{command[3]}: {outcome}, {time.monotonic() - begin:.0f} s", highlight=False)
    return outcome == "exit code 0"


def _outcome(running: subprocess.Popen[bytes], limit_s: float) -> str:
    for patience_s in (limit_s, _GRACE_S):
        try:
            return f"exit code {running.wait(patience_s)}"
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)  # train, rollout and step save what they have measured so far
    return "killed"


if __name__ == "__main__":
    main()
