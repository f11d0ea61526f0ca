"""Compares episodes of several turns with the same number of tokens in one turn, on real engines.

In one turn, the environment's tokens are part of the prompt, and as many tokens are sampled as in all turns together.

`python -m benchmarks.episodes_engine NAME [key=value ...] [--repeats 3] [--busy]`

Each repeat plays both on new prompts, one right after the other; the next repeat swaps their order. The environment
answers at once, so that all time is the engine's and the coordinator's. `--busy` says that other work ran beside it:
CPU times and their ratios are then still right, durations are not. The model has random weights.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lockstep.reward.v1 import environment_pb2, environment_pb2_grpc, reward_pb2_grpc
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

# pyright: reportAbstractUsage=false
# The toy services implement only the methods that an episode calls.
from benchmarks.episodes import ToyReward
from benchmarks.report import keep
from benchmarks.rollout_ends import Service, serving
from services.common.config.load import load
from services.common.config.run import Config
from services.common.rpc.server import Server
from services.common.tasks import gather
from services.coordinator.clients.environment import Environments
from services.coordinator.clients.reward import Rewards
from services.coordinator.data.prompts import Prompt
from services.coordinator.rl.sampling.collect import PromptRequest
from services.coordinator.rl.sampling.episodes import EpisodeCollector
from services.coordinator.text.tokenizer import Tokenizer

_CONFIG, _TOKENIZER = "deploy/runs/quickstart.yaml", "deploy/quickstart/model"
_NUM_PROMPTS, _NUM_SAMPLES, _NUM_TURNS = 2, 2, 8
_PROMPT_TOKENS, _TURN_TOKENS, _REPLY = 1024, 256, "47+85=" * 3
_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "layer_types": ["full_attention"] * 6,
    "max_position_embeddings": 4096,
}


class _Environment(environment_pb2_grpc.EnvironmentServiceServicer):
    async def Reset(self, request: Any, context: Any) -> environment_pb2.ResetResponse:
        return environment_pb2.ResetResponse()

    async def Step(self, request: Any, context: Any) -> environment_pb2.StepResponse:
        return environment_pb2.StepResponse(messages=[environment_pb2.Message(role="", content=_REPLY)])

    async def Close(self, request: Any, context: Any) -> environment_pb2.CloseResponse:
        return environment_pb2.CloseResponse()


class Comparison:
    """Plays the same prompts in several turns and in one."""

    def __init__(self, service: Service, rewards: Rewards, config: Config):
        assert config.environment, "episodes have one"
        self._service, self._config = service, config
        self._environments = Environments(rewards, config.environment)
        self._rewards, self._tokenizer = rewards, Tokenizer.load(Path(_TOKENIZER))
        self._tokenizer.eos_token_ids = ()  # so that each turn has as many tokens
        self._step = 0
        self.samples: dict[str, list[float]] = defaultdict(list)

    async def warm_up(self) -> None:
        """Plays short episodes."""
        await self._play(2, 8)

    async def repeat(self, number: int) -> None:
        """Plays both, and keeps their numbers and ratios."""
        shapes = {"8 turns": (_NUM_TURNS, _TURN_TOKENS), "1 turn": (1, _NUM_TURNS * _TURN_TOKENS)}
        drawn = {name: await self._play(*shapes[name]) for name in sorted(shapes, reverse=number % 2 == 1)}
        for name, numbers in drawn.items():
            for quantity, value in numbers.items():
                self.samples[f"{name}: {quantity}"].append(value)
        for quantity in ("engine CPU [s]", "duration [s]"):
            ratio = drawn["8 turns"][quantity] / drawn["1 turn"][quantity]
            self.samples[f"{quantity.partition(' [')[0]}: 8 turns over 1 turn"].append(ratio)

    async def close(self) -> None:
        """Waits for the ends of the episodes."""
        await self._environments.close()

    async def _play(self, num_turns: int, turn_tokens: int) -> dict[str, float]:
        self._step += 1
        environment: Any = self._config.environment
        config = self._config.model_copy(
            update={"environment": environment.model_copy(update={"max_turns": num_turns})}
        )
        collector = EpisodeCollector(self._service.rollout, self._rewards, self._tokenizer, config, self._environments)
        sampling = config.rollout.sampling.model_copy(update={"max_tokens": turn_tokens})
        draw = PromptRequest(_NUM_SAMPLES, sampling, self._service.stamp, self._step)
        cpu, begin = self._service.cpu_seconds(), time.perf_counter()
        num_tokens = _PROMPT_TOKENS + (_NUM_TURNS - num_turns) * len(_REPLY)
        prompts = [self._prompt(index, num_tokens) for index in range(_NUM_PROMPTS)]
        groups = await gather(collector.one(i, prompt, draw) for i, prompt in enumerate(prompts))
        duration, spent = time.perf_counter() - begin, self._service.cpu_seconds()
        for group in groups:
            assert group, "nothing fails"
            for completion, episode in zip(group.completions, group.episodes, strict=True):
                assert len(episode.turn_ends) == num_turns
                assert sum(map(len, episode.turns(completion.tokens))) == num_turns * turn_tokens
        numbers = {"engine CPU [s]": spent["engine"] - cpu["engine"], "duration [s]": duration}
        if "environment/cache_hit_share" in (metrics := collector.take_metrics()):
            numbers["cache hit share"] = metrics["environment/cache_hit_share"]
        return numbers

    def _prompt(self, index: int, num_tokens: int) -> Prompt:
        """Returns a prompt that is in no prefix cache yet."""
        random = np.random.default_rng([self._step, index])
        tokens = tuple(random.integers(2, 12, num_tokens).tolist())
        return Prompt(f"{self._step}/{index}", "", tokens, "", {}, ({"role": "", "content": ""},), "")


@asynccontextmanager
async def _toys(config: Config) -> AsyncIterator[Rewards]:
    server = Server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(ToyReward(), server.grpc)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(_Environment(), server.grpc)
    port = await server.start("127.0.0.1:0", ["lockstep.reward.v1.RewardService"])
    rewards = Rewards([f"127.0.0.1:{port}"], config)
    try:
        await rewards.open("run")
        yield rewards
    finally:
        await rewards.close()
        await server.grpc.stop(0)


async def measure(config: Config, repeats: int) -> dict[str, list[float]]:
    """Starts the services and plays."""
    async with serving(config) as service, _toys(config) as rewards:
        comparison = Comparison(service, rewards, config)
        await comparison.warm_up()
        for number in range(repeats):
            await comparison.repeat(number)
        await comparison.close()
        return comparison.samples


def make_model(directory: Path) -> Path:
    """Returns a model of 5M parameters with the vocabulary of the quickstart's, and room for long prompts."""
    model = directory / "model"
    shutil.copytree(_TOKENIZER, model)
    (model / "model.safetensors").unlink()
    content = json.loads((model / "config.json").read_text()) | _SHAPE
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**content), dtype=torch.float32).save_pretrained(model)
    return model


def main() -> None:
    """Makes the model, measures, and saves the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.episodes_engine")
    parser.add_argument("name", help="name of the result")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as directory:
        fixed = [
            f"model={make_model(Path(directory))}",
            f"runs_dir={directory}/runs",
            "name=episodes",
            "trainer.num_ranks=1",
            f"data.max_prompt_tokens={_PROMPT_TOKENS + _NUM_TURNS * len(_REPLY)}",
            "rollout.num_replicas=1",
            f"rollout.max_model_len={_PROMPT_TOKENS + _NUM_TURNS * (_TURN_TOKENS + 2 * len(_REPLY)) + 1}",
            "rollout.max_samples=16",
            f"rollout.sampling.max_tokens={_NUM_TURNS * _TURN_TOKENS}",
            f"rollout.engine.kv_cache_memory_bytes={1 << 30}",
            f"environment={{kind: python, path: 'toy:Toy', max_turns: {_NUM_TURNS}, on_failure: fail}}",
            "trainer.max_tokens_per_microbatch=8192",
            "timeouts.generate_s=3600",
        ]
        config = load(Config, [_CONFIG, *fixed, *options.overrides])
        (config.run_dir / "logs").mkdir(parents=True)
        try:
            samples = asyncio.run(measure(config, options.repeats))
        except (Exception, KeyboardInterrupt):
            for log in (config.run_dir / "logs").glob("*.log"):
                Console().print(log.name, log.read_text(errors="replace")[-3000:], markup=False)
            raise
    settings = {
        "episodes": _NUM_PROMPTS * _NUM_SAMPLES,
        "turns": _NUM_TURNS,
        "tokens of a prompt": _PROMPT_TOKENS,
        "tokens of a turn": _TURN_TOKENS,
        "tokens of a reply": len(_REPLY),
        "overrides": options.overrides,
    }
    libraries = ("torch", "vllm", "grpcio")
    keep(options.name, samples, libraries=libraries, machine_was_busy=options.busy, weights="random", **settings)


if __name__ == "__main__":
    main()
