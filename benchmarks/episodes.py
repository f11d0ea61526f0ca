"""Measures the coordinator's CPU time for a turn of an episode, with 1,000 episodes open at once.

Engine and environment are toys in a second process: they answer at once, with real messages over gRPC. Generated tokens
are digits, so that the environment's messages are raw text for the tokenizer of the quickstart's model.

`python -m benchmarks.episodes [NAME] [--busy]` saves the result as NAME; `--busy` says that other work ran beside it.
"""

import argparse

# pyright: reportAbstractUsage=false
# The toy services implement only the methods that an episode calls.
import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from lockstep.reward.v1 import environment_pb2, environment_pb2_grpc, reward_pb2, reward_pb2_grpc
from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.types.v1.types_pb2 import FINISH_REASON_STOP, Completion, ModelCard, PolicyStamp

from benchmarks.report import keep
from services.common.batches import tokens_sha256
from services.common.config.run import Config
from services.common.rpc.server import Server
from services.common.rpc.transfer import seal
from services.common.tasks import gather
from services.coordinator.clients.environment import Environments
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Rollout
from services.coordinator.data.prompts import Prompt
from services.coordinator.rl.sampling.collect import PromptRequest
from services.coordinator.rl.sampling.episodes import EpisodeCollector
from services.coordinator.text.tokenizer import Tokenizer

_MODEL = "deploy/quickstart/model"
_NUM_PROMPTS, _NUM_SAMPLES, _NUM_TURNS = 125, 8, 8
_NUM_EPISODES = _NUM_PROMPTS * _NUM_SAMPLES
_TURN_TOKENS, _REPLY, _PROMPT_TOKENS, _EOS = 32, "47+85=" * 3, 16, 1
_ROUNDS = 3
_STAMP = PolicyStamp(version=0, digest="d" * 32)


class _Engine(rollout_pb2_grpc.RolloutServiceServicer):
    async def OpenRun(self, request: Any, context: Any) -> rollout_pb2.OpenRunResponse:
        return rollout_pb2.OpenRunResponse(num_workers=1, max_samples=_NUM_EPISODES)

    async def CommitWeights(self, request: Any, context: Any) -> rollout_pb2.CommitWeightsResponse:
        return rollout_pb2.CommitWeightsResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        (prompt,) = request.prompts
        (seed,) = prompt.seeds
        tokens = [2 + (seed + i) % 10 for i in range(_TURN_TOKENS - 1)] + [_EOS]
        logprobs = [-1.0] * _TURN_TOKENS
        answer = rollout_pb2.GenerateResponse(
            prompt_id=prompt.prompt_id,
            completions=[Completion(tokens=tokens, logprobs=logprobs, finish_reason=FINISH_REASON_STOP, seed=seed)],
            stamp=request.expected_stamp,
            prompt_num_tokens=len(prompt.tokens),
            prompt_sha256=tokens_sha256(prompt.tokens),
        )
        yield seal(request, answer)


class ToyReward(reward_pb2_grpc.RewardServiceServicer):
    """Opens a toy environment, and scores everything with 1."""

    async def OpenRun(self, request: Any, context: Any) -> reward_pb2.OpenRunResponse:
        return reward_pb2.OpenRunResponse(scorer="toy 1", environment="toy 1", roles=[""])

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        scores = [reward_pb2.Score(reward=1.0, components={"exact": 1.0}) for _ in request.candidates]
        return seal(request, reward_pb2.ScoreResponse(scores=scores, scorer="toy 1"))


class _Environment(environment_pb2_grpc.EnvironmentServiceServicer):
    def __init__(self) -> None:
        self._open = 0
        self._all = asyncio.Event()

    async def Reset(self, request: Any, context: Any) -> environment_pb2.ResetResponse:
        """Waits until all episodes are open."""
        self._open += 1
        if self._open == _NUM_EPISODES:
            self._all.set()
        await self._all.wait()
        return environment_pb2.ResetResponse()

    async def Step(self, request: Any, context: Any) -> environment_pb2.StepResponse:
        messages = [environment_pb2.Message(role="", content=_REPLY)]
        return environment_pb2.StepResponse(messages=messages, reward=0.5, done=request.turn == _NUM_TURNS - 1)

    async def Close(self, request: Any, context: Any) -> environment_pb2.CloseResponse:
        self._open -= 1
        if not self._open:
            self._all.clear()
        return environment_pb2.CloseResponse()


async def _serve() -> None:
    server = Server()
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(_Engine(), server.grpc)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(ToyReward(), server.grpc)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(_Environment(), server.grpc)
    port = await server.start("127.0.0.1:0", ["lockstep.reward.v1.RewardService", "lockstep.rollout.v1.RolloutService"])
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)  # ends with the parent


async def _measure(address: str) -> dict[str, list[float]]:
    config = Config.model_validate(
        {
            "model": _MODEL,
            "data": {"train": "-", "prompts_per_step": _NUM_PROMPTS, "max_prompt_tokens": _PROMPT_TOKENS},
            "rollout": {"max_model_len": 512, "sampling": {"max_tokens": _TURN_TOKENS}},
            "environment": {
                "kind": "python",
                "path": "toy:Toy",
                "max_turns": _NUM_TURNS,
                "turn_s": 600,
                "on_failure": "fail",
            },
            "reward": {"scorers": [{"kind": "exact"}]},
            "timeouts": {"generate_s": 600, "score_s": 600},
        }
    )
    rollout, rewards = Rollout([address], config), Rewards([address], config)
    await rollout.open("run", ModelCard())
    await rewards.open("run")
    await rollout.replicas[0].commit(_STAMP)
    assert config.environment, "it was set"
    environments = Environments(rewards, config.environment)
    collector = EpisodeCollector(rollout, rewards, Tokenizer.load(Path(_MODEL)), config, environments)
    samples: dict[str, list[float]] = {"coordinator CPU per turn [ms]": [], "turns [1/s]": []}
    for step in range(1 + _ROUNDS):  # one to warm up
        draw = PromptRequest(_NUM_SAMPLES, config.rollout.sampling, _STAMP, step)
        cpu, begin = time.process_time(), time.perf_counter()
        groups = await gather(collector.one(i, _prompt(i), draw) for i in range(_NUM_PROMPTS))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
        num_turns = sum(len(episode.turn_ends) for group in groups if group for episode in group.episodes)
        assert num_turns == _NUM_EPISODES * _NUM_TURNS
        if step:
            samples["coordinator CPU per turn [ms]"].append(1000 * cpu / num_turns)
            samples["turns [1/s]"].append(num_turns / wall)
    await gather([environments.close(), rollout.close(), rewards.close()])
    return samples


def _prompt(index: int) -> Prompt:
    text = f"{index}+1="
    tokens = (2,) * _PROMPT_TOKENS
    return Prompt(f"p{index}", text, tokens, "1", {}, ({"role": "", "content": text},), text)


def main() -> None:
    """Starts the toys, measures, and saves the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="episodes")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(_serve())
        return
    command = [sys.executable, "-m", "benchmarks.episodes", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as toys:
        assert toys.stdin and toys.stdout
        port = int(toys.stdout.readline())
        samples = asyncio.run(_measure(f"127.0.0.1:{port}"))
        toys.stdin.close()
    settings = {"episodes": _NUM_EPISODES, "turns": _NUM_TURNS, "tokens of a turn": _TURN_TOKENS}
    keep(arguments.name, samples, libraries=("grpcio", "tokenizers"), machine_was_busy=arguments.busy, **settings)


if __name__ == "__main__":
    main()
