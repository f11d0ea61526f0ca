"""Measures float8 beside bfloat16 on one GPU, with a real model shape and random weights.

`python -m benchmarks.fp8 rollout NAME SHAPE [--models DIR] [--kv-cache] [--tokens 320]` starts an engine for each
precision, one after the other: seconds to generate 512 samples at once, seconds to load, quantize and hash a
publication (without a network: benchmarks.colocated measures a whole one), and the difference between the engine's
log-probabilities and those of the trainer. It ends with an error if the bytes that were sent have another hash in
another precision; if the quantized weights of an engine that was published to eight times, and slept twice, are not
those of a new engine with the same weights; or if publications did not become direct copies.

`python -m benchmarks.fp8 training NAME [--updates 30]` trains eight layers of the 8B shape with Megatron in each
precision: tokens/s, MFU, memory and the curve of the loss (benchmarks.fp8_training).

`python -m benchmarks.fp8 learning NAME [key=value ...]` runs the quickstart on one GPU with an engine of each precision
and three seeds at the same time: held-out accuracy by step, and the difference between engine and trainer.

Results are saved after each part. SHAPE is one of benchmarks.megatron_layouts.MODELS. --tiny is for CPU, where only
bfloat16 runs.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
import torch.distributed as dist

from benchmarks.fp8_training import train
from benchmarks.learning import SEEDS, accuracies, metrics
from benchmarks.random_model import add_options, make_random_model
from benchmarks.report import keep
from benchmarks.routing import logprob_gaps, open_policy
from services.common import batches
from services.common.config.rollout import RolloutConfig
from services.trainer.ranks.worker import Worker

_SEED, _NUM_SAMPLES, _PROMPT_TOKENS, _GROUP = 0, 512, 128, 8
_COMPARED = 64  # samples whose log-probabilities the trainer computes
# Factors of the published weights. The first two publications are recorded and checked, the last has the model's own.
_FACTORS = (1.0, 1.25, 1.5, 0.75, 1.125, 1.0)
_WARM_UP, _ASLEEP_FACTOR = 2, 1.5
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {},
    "fp8": {"precision": "fp8"},
    "fp8 with fp8 KV cache": {"precision": "fp8", "kv_cache_dtype": "fp8"},
}
_QUICKSTART = "deploy/runs/quickstart.yaml"
_LEARNING = (
    "placement=colocated",
    "trainer.num_ranks=1",
    "rollout.num_replicas=1",
    "trainer.compute_dtype=bfloat16",
    "rollout.dtype=bfloat16",
    "trainer.loss.correction.weight=token",
    # Several engines start on the GPU at the same time, so that none can measure what is free.
    f"rollout.engine={{enforce_eager: true, gpu_memory_utilization: 0.1, kv_cache_memory_bytes: {1 << 30}}}",
    "checkpoint.save_freq=0",
    "checkpoint.export_at_end=false",
)
_COMPARED_METRICS = {
    "engine-trainer difference, mean [nats]": "train/logprob_diff_mean",
    "effective sample size of the correction": "train/logprob_diff_ess",
}
Samples = dict[str, list[float]]


class Engine:
    """Runs vLLM's LLM with the rollout service's arguments, and publishes to it."""

    def __init__(self, model: Path, precision: Mapping[str, Any], options: argparse.Namespace, *, eager: bool = False):
        from vllm import LLM

        from services.rollout.arguments import Needs, engine_arguments

        is_gpu = torch.cuda.is_available()
        engine: dict[str, Any] = {"gpu_memory_utilization": options.utilization} if is_gpu else {}
        if eager:
            engine["enforce_eager"] = True
        elif is_gpu:  # fewer than vLLM's own, which take minutes
            engine["compilation_config"] = {"cudagraph_capture_sizes": [1, 8, 32, 64, 128, 256, 384, 512]}
        config = RolloutConfig(
            dtype="bfloat16",
            max_model_len=_PROMPT_TOKENS + options.tokens,
            max_samples=_NUM_SAMPLES if is_gpu else 8,
            engine=engine,
            **precision,
        )
        extension = "benchmarks.fp8_receiver.LocalReceiver"
        made: dict[str, Any] = {**engine_arguments(config, str(model), _SEED, Needs(can_sleep=is_gpu))}
        made["worker_extension_cls"] = extension
        begin = time.perf_counter()
        self.llm = LLM(**made)
        self.start_s = time.perf_counter() - begin
        (self.num_bytes,) = self.llm.collective_rpc("lockstep_read", args=(str(model),))

    def publish(self, factor: float) -> dict[str, Any]:
        (published,) = self.llm.collective_rpc("lockstep_publish", args=(factor,))
        return published

    def publish_after_sleep(self, factor: float) -> dict[str, Any]:
        """Lets the engine drop its weights and publishes others."""
        self.llm.collective_rpc("lockstep_before_sleep")
        self.llm.sleep(level=2)
        self.llm.wake_up(tags=["weights"])
        published = self.publish(factor)
        self.llm.wake_up(tags=["kv_cache"])
        return published

    def generate(self, num_samples: int, max_tokens: int, seed: int) -> tuple[float, list[Any]]:
        """Returns the seconds that the samples took, and vLLM's outputs."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        random = np.random.default_rng(seed)
        vocab = self.llm.llm_engine.model_config.get_vocab_size()
        prompts = random.integers(0, vocab, (num_samples // _GROUP, _PROMPT_TOKENS)).tolist()
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, seed=index)
            for index in range(num_samples)
        ]
        self.llm.reset_prefix_cache()  # of other weights
        asked = [TokensPrompt(prompt_token_ids=prompts[index // _GROUP]) for index in range(num_samples)]
        begin = time.perf_counter()
        outputs = self.llm.generate(asked, sampling, use_tqdm=False)
        return time.perf_counter() - begin, outputs


def measure_engine(model: Path, out: Path, precision: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Publishes to one engine, generates with it, and writes what it has found to `out`. A process of its own."""
    _configure()
    engine, found = Engine(model, precision, options), defaultdict(list)
    found["engine start [s]"].append(engine.start_s)
    published = [engine.publish(factor) for factor in _FACTORS]
    found["load, quantize and hash a publication [s]"] = [one["duration_s"] for one in published[_WARM_UP:]]
    found["publication by vLLM's reload [s]"] = [one["duration_s"] for one in published[:1]]
    num_samples = _NUM_SAMPLES if torch.cuda.is_available() else 16
    engine.generate(num_samples, 8, seed=100)
    for repeat in range(options.repeats):
        seconds, outputs = engine.generate(num_samples, options.tokens, seed=repeat)
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        found["generate 512 samples [s]"].append(seconds)
        found["generated [tokens/s]"].append(num_tokens / seconds)
        _write(outputs[:_COMPARED], out.with_suffix(".arrow"))
    checks = {"published": published, "bytes": engine.num_bytes}
    out.write_text(json.dumps({"samples": found, **checks}))  # so that a failure below keeps it
    if torch.cuda.is_available():
        checks["asleep"] = [engine.publish_after_sleep(factor) for factor in (_ASLEEP_FACTOR, 1.0)]
        _, outputs = engine.generate(num_samples, options.tokens, seed=0)
        _write(outputs[:_COMPARED], out.with_suffix(".asleep.arrow"))
    out.write_text(json.dumps({"samples": found, **checks}))


def measure_new(model: Path, out: Path, precision: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Publishes once to a new engine, and writes its answer to `out`. A process of its own."""
    _configure()
    engine = Engine(model, precision, options, eager=True)
    out.write_text(json.dumps(engine.publish(_ASLEEP_FACTOR)))


def _configure() -> None:
    from services.rollout.__main__ import _configure_vllm

    _configure_vllm()


def _write(outputs: list[Any], path: Path) -> None:
    rows = [_row(index, output) for index, output in enumerate(outputs)]
    table = pa.Table.from_pylist(rows, schema=batches.SAMPLE_SCHEMA)
    path.write_bytes(b"".join(batches.encode(table, frame_bytes=1 << 40)))


def _row(index: int, output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    chosen = zip(completion.token_ids, completion.logprobs, strict=True)
    return {
        "prompt_id": str(index // _GROUP),
        "group": index // _GROUP,
        "sample": index % _GROUP,
        "prompt_tokens": output.prompt_token_ids,
        "tokens": list(completion.token_ids),
        "logprobs": [min(0.0, at[token].logprob) for token, at in chosen],
        "reward": 0.0,
        "components": [],
        "finish_reason": "length",
        "policy_version": 0,
        "policy_digest": "",
        "scorer": "none",
        "seed": index,
    }


def differences(model: Path, arrows: Mapping[str, Path]) -> Samples:
    """Returns |engine - trainer| of the samples of each precision. The trainer computes in bfloat16."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    worker, found = Worker(dist.HashStore(), 0, 1, device), Samples()
    config = open_policy(worker, model, 8192)
    for name, path in arrows.items():
        samples = batches.decode([path.read_bytes()], schema=batches.SAMPLE_SCHEMA)
        gaps, _ = logprob_gaps(worker, config, samples)
        found |= {
            f"{name}: engine-trainer difference, mean [nats]": [float(gaps.mean())],
            f"{name}: engine-trainer difference, 99 % [nats]": [float(np.quantile(gaps, 0.99))],
            f"{name}: engine-trainer difference, max [nats]": [float(gaps.max())],
        }
    worker.close()
    return found


def require_right(found: Mapping[str, Any], new: Mapping[str, Any] | None) -> None:
    """Raises AssertionError if the engines do not have what was sent."""
    sent = {name: [one["digest"] for one in each["published"]] for name, each in found.items()}
    assert len(set(map(tuple, sent.values()))) == 1, f"other bytes in another precision: {sent}"
    for name, each in found.items():
        published = each["published"]
        is_gpu = torch.cuda.is_available()  # on CPU vLLM packs weights
        assert not is_gpu or all(one["is_direct"] for one in published[1:]), (
            f"{name} uses the reload: {published[-1]['problem']}"
        )
        quantizes = [bool(one["quantized_digest"]) for one in published]
        assert set(quantizes) == {name != "bf16"}, f"{name}: {quantizes}"
        assert published[0]["quantized_digest"] == published[-1]["quantized_digest"], f"{name}: the same weights"
        other, same = each.get("asleep") or (None, None)
        if other and same:
            assert same["quantized_digest"] == published[0]["quantized_digest"], f"{name}: after sleep"
            assert same["digest"] == published[0]["digest"], f"{name}: after sleep"
        if other and new and name == "fp8":
            assert other["quantized_digest"] == new["quantized_digest"], "a new engine has other quantized weights"
            assert other["digest"] == new["digest"], "a new engine has other weights"


def rollout(options: argparse.Namespace) -> None:
    """Measures all precisions and saves the result after each."""
    names = [name for name in PRECISIONS if options.kv_cache or "KV" not in name]
    names = names if torch.cuda.is_available() else names[:1]
    kept, found, new, failed = Samples(), dict[str, Any](), None, list[str]()

    def save() -> None:
        workload = f"{_NUM_SAMPLES} samples of {_PROMPT_TOKENS} + {options.tokens} tokens at once"
        settings = {"shape": options.shape, "weights": "random", "workload": workload, "engines": found, "new": new}
        keep(options.name, kept, libraries=("torch", "vllm", "transformers"), **settings)

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model = options.model or make_random_model(directory, options.shape, options)
        arrows = {name: directory / f"{number}.arrow" for number, name in enumerate(names)}
        for name, arrow in arrows.items():
            path = arrow.with_suffix(".json")
            is_whole = _in_process(measure_engine, model, path, PRECISIONS[name], options)
            if not path.exists():
                failed.append(name)
                continue
            found[name] = json.loads(path.read_text())
            failed += [] if is_whole else [name]
            kept |= {f"{name}: {quantity}": values for quantity, values in found[name].pop("samples").items()}
            kept |= _ratios(kept, name)
            save()
        if "fp8" in found and _in_process(measure_new, model, directory / "new.json", PRECISIONS["fp8"], options):
            new = json.loads((directory / "new.json").read_text())
        asleep = {f"{name}, after sleep": arrow.with_suffix(".asleep.arrow") for name, arrow in arrows.items()}
        kept |= differences(model, {name: path for name, path in (arrows | asleep).items() if path.exists()})
        save()
    require_right(found, new)
    for name in found.keys() - {"bf16"}:
        mean = "engine-trainer difference, mean [nats]"
        awake, slept = kept[f"{name}: {mean}"], kept[f"{name}, after sleep: {mean}"]
        assert slept[0] < 2 * awake[0], f"{name}: after sleep the engine computes something else: {slept}, {awake}"
    if failed or ("fp8" in found and new is None):
        sys.exit(f"an engine failed, see above: {failed}")


def _ratios(kept: Samples, name: str) -> Samples:
    of = lambda who, quantity: float(np.median(kept[f"{who}: {quantity}"]))  # noqa: E731
    quantities = ("generate 512 samples [s]", "load, quantize and hash a publication [s]")
    label = "over bf16 [ratio of medians]"
    if name == "bf16" or f"bf16: {quantities[0]}" not in kept:
        return {}
    return {f"{name}: {what}, {label}": [of(name, what) / of("bf16", what)] for what in quantities}


def _in_process(target: Callable[..., None], *args: Any) -> bool:
    """Runs `target` in a process of its own, whose memory is free again when it ends. Returns whether it succeeded."""
    process = multiprocessing.get_context("spawn").Process(target=_call, args=(target, *args))
    process.start()
    process.join()
    return process.exitcode == 0


def _call(target: Callable[..., None], *args: Any) -> None:
    try:
        target(*args)
    except BaseException:  # Python would wait for an engine's processes, which wait for more work
        for child in psutil.Process().children(recursive=True):
            child.kill()
        raise


def learning(name: str, overrides: Sequence[str]) -> None:
    """Runs the quickstart with each precision, and saves what is known after each."""
    kept = Samples()
    for precision, settings in PRECISIONS.items():
        changes = [*_LEARNING, *(f"rollout.{key}={value}" for key, value in settings.items()), *overrides]
        with ThreadPoolExecutor(len(SEEDS)) as pool:
            runs = list(pool.map(lambda seed, changes=changes: metrics(_QUICKSTART, [*changes, f"seed={seed}"]), SEEDS))
        curves = list(map(accuracies, runs))
        for step in curves[0]:
            kept[f"{precision}: held-out accuracy after {step} steps"] = [curve[step] for curve in curves]
        for label, key in _COMPARED_METRICS.items():
            kept[f"{precision}: {label}"] = [np.mean([row[key] for row in rows if key in row]).item() for rows in runs]
        keep(name, kept, libraries=("torch", "vllm", "transformers"), config=_QUICKSTART, overrides=changes)


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8")
    parts = parser.add_subparsers(dest="part", required=True)
    of_rollout, of_training = parts.add_parser("rollout"), parts.add_parser("training")
    of_rollout.add_argument("name")
    of_rollout.add_argument("shape")
    of_rollout.add_argument("--model", type=Path, help="directory of a real model to use instead")
    of_rollout.add_argument("--kv-cache", action="store_true", help="also measure with a KV cache in float8")
    of_rollout.add_argument("--tokens", type=int, default=320)
    of_rollout.add_argument("--utilization", type=float, default=0.62, help="share of the GPU for the engine")
    of_rollout.add_argument("--repeats", type=int, default=2)
    add_options(of_rollout)
    of_learning = parts.add_parser("learning")
    of_learning.add_argument("name")
    of_learning.add_argument("overrides", nargs="*")
    of_training.add_argument("name")
    of_training.add_argument("--updates", type=int, default=30)
    of_training.add_argument("--tiny", action="store_true", help="use small models, for CPU")
    options = parser.parse_args()
    if options.part == "rollout":
        rollout(options)
    elif options.part == "learning":
        learning(options.name, options.overrides)
    else:
        train(options)


if __name__ == "__main__":
    main()
