"""Compares the rollout service over gRPC with vLLM's LLM.generate: tokens/s, time to first group, tail, host CPU time.

`python -m benchmarks.rollout NAME SHAPE [key=value ...] [--concurrency 512,1024,2048] [--repeats 3]`

SHAPE is one of benchmarks.megatron_layouts.MODELS; weights are random. A trainer publishes them to the replicas. LLM
loads the same weights in a process of its own, with the engine arguments of the service. In each repeat, both get the
same batch of that many samples, one right after the other; the next repeat swaps their order. On a GPU host LLM shares
the GPU of the first replica, which is idle during LLM's turn: set rollout.engine.kv_cache_memory_bytes to a size that
fits twice, or set --bare-gpu.

With `--no-bare rollout.num_replicas=2` and rollout.max_samples below half of the concurrency, it shows the tail of the
dispatch.
"""

import argparse
import asyncio
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.lengths import MAX_TOKENS, PROMPT_TOKENS
from benchmarks.random_model import add_options, make_random_model
from benchmarks.report import keep
from benchmarks.rollout_ends import Bare, Batch, Drawn, Service, bare_engine, serving
from benchmarks.rollout_lengths import by_seed
from services.common.config.load import load
from services.common.config.run import Config
from services.common.tasks import gather
from services.coordinator.clients.gpus import visible_gpus
from services.coordinator.data.prompts import Prompt

_CONFIG = "deploy/runs/quickstart.yaml"
_WARM_UP_SAMPLES, _WARM_UP_TOKENS = 64, 16
Samples = Mapping[str, list[float]]
Keep = Callable[[Mapping[str, Any], Samples], None]


class Comparison:
    """Samples batches from both ends and saves the numbers after each."""

    def __init__(self, config: Config, service: Service, bare: Bare | None, keep_now: Keep):
        self._config, self._keep_now, self._engine = config, keep_now, bare.settings if bare else {}
        self._ends: dict[str, Service | Bare] = {"service": service} | ({"bare": bare} if bare else {})
        self._service = service
        self._length_of = by_seed(**config.rollout.engine["additional_config"])
        self._vocab_size = json.loads((Path(config.model) / "config.json").read_text())["vocab_size"]
        self._samples: dict[str, list[float]] = defaultdict(list)

    async def warm_up(self) -> None:
        """Samples a small batch of short samples, so that everything is compiled."""
        batch = self._batch("warm-up", _WARM_UP_SAMPLES, _WARM_UP_TOKENS)
        for end in self._ends.values():
            self._check(await end.draw(batch), batch)

    async def repeat(self, number: int, num_samples: int) -> None:
        """Samples one batch from both ends, alternating which goes first."""
        batch = self._batch(f"{num_samples}/{number}", num_samples, self._config.rollout.sampling.max_tokens)
        rates = {}
        for name in sorted(self._ends, reverse=number % 2 == 1):
            drawn = await self._ends[name].draw(batch)
            self._check(drawn, batch)
            numbers = drawn.numbers(num_samples)
            rates[name] = numbers["tokens/s"]
            for quantity, value in numbers.items():
                self._samples[f"{num_samples} at once: {name}: {quantity}"].append(value)
        if "bare" in rates:
            ratio = f"{num_samples} at once: tokens/s of the service over those of bare vLLM"
            self._samples[ratio].append(rates["service"] / rates["bare"])
        self._keep_now(self._engine, self._samples)

    def _batch(self, label: str, num_samples: int, max_tokens: int) -> Batch:
        """Returns different prompts for each label, so that none is in a prefix cache."""
        random, settings = np.random.default_rng(list(label.encode())), self._config.rollout
        most = self._config.data.max_prompt_tokens
        prompts = [
            Prompt(
                f"{label}/{group}",
                "",
                tuple(random.integers(0, self._vocab_size, random.integers(most // 2, most + 1)).tolist()),
                "",
                {},
                (),
                "",
            )
            for group in range(num_samples // settings.completions_per_prompt)
        ]
        return self._service.batch(prompts, settings.sampling.model_copy(update={"max_tokens": max_tokens}))

    def _check(self, drawn: Drawn, batch: Batch) -> None:
        """Checks that samples have the fixture's lengths; otherwise the ends would not be comparable."""
        expected = sum(self._length_of(seed, batch.sampling.max_tokens) for seeds in batch.seeds for seed in seeds)
        if drawn.num_tokens != expected:
            raise RuntimeError(f"{drawn.num_tokens} tokens were sampled, but the fixture has {expected}")


async def measure(config: Config, options: argparse.Namespace, keep_now: Keep) -> None:
    """Starts both ends and samples all batches."""
    async with AsyncExitStack() as stack:
        opening: list[Coroutine[Any, Any, Service | Bare]] = [stack.enter_async_context(serving(config))]
        if not options.no_bare:
            index = options.bare_gpu if options.bare_gpu is not None else config.trainer.num_ranks
            gpus = visible_gpus()
            opening.append(stack.enter_async_context(bare_engine(config, gpus[index] if gpus else None)))
        ends = await gather(opening)
        service = next(end for end in ends if isinstance(end, Service))
        bare = next((end for end in ends if isinstance(end, Bare)), None)
        comparison = Comparison(config, service, bare, keep_now)
        await comparison.warm_up()
        for number in range(options.repeats):
            for num_samples in options.concurrency:
                await comparison.repeat(number, num_samples)


def fixed(options: argparse.Namespace, model: Path) -> list[str]:
    """Returns the config that the overrides of the command line apply to."""
    longest, prompt, shorter_by = (128, 16, 32) if options.tiny else (MAX_TOKENS - PROMPT_TOKENS, PROMPT_TOKENS, 1)
    return [
        f"model={model}",
        f"runs_dir={model.parent}/runs",
        "name=rollout",
        "trainer.num_ranks=1",
        "trainer.max_tokens_per_microbatch=8192",
        f"data.max_prompt_tokens={prompt}",
        "rollout.num_replicas=1",
        f"rollout.max_model_len={longest + prompt}",
        f"rollout.sampling.max_tokens={longest}",
        f"rollout.max_samples={max(options.concurrency)}",
        "rollout.engine.scheduler_cls=benchmarks.rollout_lengths.scheduler",
        f"rollout.engine.additional_config={{mean_tokens: 819, shorter_by: {shorter_by}}}",
    ]


def parse() -> argparse.Namespace:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout")
    parser.add_argument("name", help="name of the result")
    parser.add_argument("shape", help="one of benchmarks.megatron_layouts.MODELS")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--concurrency", type=lambda text: [int(part) for part in text.split(",")], default="512,1024,2048"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-bare", action="store_true", help="measure only the service")
    parser.add_argument(
        "--bare-gpu", type=int, help="index of LLM's GPU among the visible ones (default: the first replica's)"
    )
    add_options(parser)
    return parser.parse_intermixed_args()


def main() -> None:
    """Makes the model, measures, and saves the result after each batch."""
    options = parse()

    def keep_now(engine: Mapping[str, Any], samples: Samples) -> None:
        settings = {"shape": options.shape, "weights": "random", "overrides": options.overrides, "engine": engine}
        keep(options.name, samples, libraries=("torch", "vllm", "grpcio"), **settings)

    with tempfile.TemporaryDirectory() as directory:
        model = make_random_model(Path(directory), options.shape, options)
        config = load(Config, [_CONFIG, *fixed(options, model), *options.overrides])
        (config.run_dir / "logs").mkdir(parents=True)
        try:
            asyncio.run(measure(config, options, keep_now))
        except (Exception, KeyboardInterrupt):
            for log in (config.run_dir / "logs").glob("*.log"):
                Console().print(log.name, log.read_text(errors="replace")[-3000:], markup=False)
            raise


if __name__ == "__main__":
    main()
