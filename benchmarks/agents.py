"""Compares an agent with the `openai` client to the same conversations as an environment of kind python.

Engine: a toy in a process of its own, which always says the same tokens: after the same time, in which case all
episodes want the processor at once, or after times that differ by answer, as those of real answers do. Reward services,
workers, HTTP, gRPC and tokenizing are real. Both kinds make the same rows, token by token, which is checked.

`python -m benchmarks.agents [NAME] [--rounds 5] [--busy]` saves the result as NAME; `--busy` says that other work ran
beside it.
Needs the tokenizer of `python -m deploy.quickstart.make_lookup`, and `openai`.
"""

# pyright: reportAbstractUsage=false
# The toy engine implements only the methods that an episode calls.
import argparse
import asyncio
import os
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.types.v1.types_pb2 import FINISH_REASON_STOP, Completion, ModelCard, PolicyStamp, ServiceInfo

from benchmarks.report import keep
from services.common.batches import tokens_sha256
from services.common.config.run import Config
from services.common.rpc.server import Server
from services.common.rpc.transfer import seal
from services.common.tasks import gather
from services.coordinator.clients.environment import Environments
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Rollout
from services.coordinator.data.groups import ScoredGroup, to_table
from services.coordinator.data.prompts import Prompt
from services.coordinator.rl.sampling import agents as agents_module
from services.coordinator.rl.sampling.agents import AgentCollector
from services.coordinator.rl.sampling.collect import PromptRequest
from services.coordinator.rl.sampling.episodes import EpisodeCollector
from services.coordinator.text.threads import Threads
from services.coordinator.text.tokenizer import Tokenizer

_MODEL = "data/lookup/start"
_NUM_EPISODES, _NUM_TURNS = 64, 6
_REPLY_CHARS, _TURN_TOKENS, _LATENCY_S = 400, 64, 1.5  # a character is a token
_QUESTION = "q" * 32
_EQUAL, _VARIED = "equal", "varied"
"""How the times of the engine's answers are: what ids of prompts begin with."""
_STAMP = PolicyStamp(version=0, digest="d" * 32)


class Talk:
    """The environment."""

    def reset(self, seed: int, row: Mapping[str, str]) -> None:
        self._turn = 0

    def step(self, text: str) -> tuple[list[dict[str, str]], float, bool]:
        self._turn += 1
        if self._turn == _NUM_TURNS:
            return [], 0.0, True
        return [{"role": "user", "content": _reply(self._turn)}], 0.0, False


async def agent(row: Mapping[str, str], seed: int, url: str, key: str) -> str:
    """The agent. Its worker's episodes share the connections of one client, as a careful program's do."""
    from openai import AsyncOpenAI

    global _client
    _client = _client or AsyncOpenAI(base_url=url, api_key="none")
    client = _client.with_options(base_url=f"{url}/v1", api_key=key)
    history: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for turn in range(1, _NUM_TURNS + 1):
        answer = await client.chat.completions.create(model="policy", messages=history)
        text = answer.choices[0].message.content
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": _reply(turn)}]
    return "1"


_client: Any = None


def _reply(turn: int) -> str:
    return str(turn) * _REPLY_CHARS


class _Engine(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, tokens: Sequence[int]):
        self._tokens = tokens

    async def GetInfo(self, request: Any, context: Any) -> rollout_pb2.GetInfoResponse:
        return rollout_pb2.GetInfoResponse(info=ServiceInfo(), num_workers=1, max_samples=_NUM_EPISODES)

    async def CloseRun(self, request: Any, context: Any) -> rollout_pb2.CloseRunResponse:
        return rollout_pb2.CloseRunResponse()

    async def OpenRun(self, request: Any, context: Any) -> rollout_pb2.OpenRunResponse:
        return rollout_pb2.OpenRunResponse(num_workers=1, max_samples=_NUM_EPISODES)

    async def CommitWeights(self, request: Any, context: Any) -> rollout_pb2.CommitWeightsResponse:
        return rollout_pb2.CommitWeightsResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        (prompt,) = request.prompts
        # Depends on what both kinds ask, and is the same for both.
        part = zlib.crc32(f"{prompt.prompt_id}/{len(prompt.tokens)}".encode()) / 2**32
        await asyncio.sleep(_LATENCY_S * (0.5 + part if prompt.prompt_id.startswith(_VARIED) else 1))
        said = {"tokens": self._tokens, "logprobs": [-1.0] * len(self._tokens), "seed": prompt.seeds[0]}
        answer = rollout_pb2.GenerateResponse(
            prompt_id=prompt.prompt_id,
            completions=[Completion(**said, finish_reason=FINISH_REASON_STOP)],
            stamp=request.expected_stamp,
            prompt_num_tokens=len(prompt.tokens),
            prompt_sha256=tokens_sha256(prompt.tokens),
        )
        yield seal(request, answer)


async def _serve() -> None:
    tokens = Tokenizer.load(Path(_MODEL)).encode("a" * (_TURN_TOKENS - 1) + "<eos>")
    server = Server()
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(_Engine(tokens), server.grpc)
    port = await server.start("127.0.0.1:0", ["lockstep.rollout.v1.RolloutService"])
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)  # ends with the parent


_KINDS: Mapping[str, dict[str, Any]] = {
    "python": {"kind": "python", "path": "benchmarks.agents:Talk", "max_turns": _NUM_TURNS},
    "agent": {"kind": "agent", "path": "benchmarks.agents:agent", "tool_syntax": "none", "max_calls": _NUM_TURNS},
}


def _config(kind: str) -> Config:
    return Config.model_validate(
        {
            "model": _MODEL,
            "data": {"train": "-", "prompts_per_step": _NUM_EPISODES, "max_prompt_tokens": 128, "chat": True},
            "rollout": {"max_model_len": 8192, "sampling": {"max_tokens": _TURN_TOKENS}},
            "environment": {**_KINDS[kind], "on_failure": "fail", "num_workers": 2},
            "reward": {"scorers": [{"kind": "exact"}]},
            "timeouts": {"generate_s": 600, "score_s": 600},
        }
    )


class _Stage:
    """A collector of one kind with its own reward service."""

    def __init__(self, kind: str, engine: str, reward: str):
        self._config, self._engine, self._reward, self._kind = _config(kind), engine, reward, kind

    async def open(self) -> None:
        config = self._config
        self._rollout, self._rewards = Rollout([self._engine], config), Rewards([self._reward], config)
        await self._rollout.open("run", ModelCard())
        await self._rewards.open("run")
        await self._rollout.replicas[0].commit(_STAMP)
        assert config.environment, "it was set"
        self._environments = Environments(self._rewards, config.environment)
        kind = AgentCollector if self._kind == "agent" else EpisodeCollector
        tokenizer = Tokenizer.load(Path(_MODEL))
        self._collector = kind(self._rollout, self._rewards, tokenizer, config, self._environments)
        self._first = tokenizer.encode(tokenizer.render([{"role": "user", "content": _QUESTION}]))

    async def play(self, step: int, latency: str) -> tuple[float, list[Any]]:
        """Plays all episodes at once. Returns the seconds, and the tokens of each row."""
        draw = PromptRequest(1, self._config.rollout.sampling, _STAMP, step)
        message = ({"role": "user", "content": _QUESTION},)
        prompts = [
            Prompt(f"{latency}-{index}", _QUESTION, tuple(self._first), "1", {}, message, _QUESTION)
            for index in range(_NUM_EPISODES)
        ]
        begin = time.perf_counter()
        groups = await gather(self._collector.one(index, prompt, draw) for index, prompt in enumerate(prompts))
        seconds = time.perf_counter() - begin
        table = to_table([group for group in groups if isinstance(group, ScoredGroup)])
        names = ["prompt_tokens", "tokens", "turn_begins", "turn_ends"]
        return seconds, [list(row.values()) for row in table.select(names).to_pylist()]

    async def close(self) -> None:
        await gather([self._environments.close(), self._rewards.close()])
        await self._rollout.close()


def _watch_waits() -> list[float]:
    """Returns a list that gets, for each call, how long it waited until its own tokenizing began, in ms."""
    waits, came, add = list[float](), dict[int, float](), Threads.add
    answer = agents_module.AgentEpisode.answer

    async def timed_answer(self: Any, asked: Any) -> Any:
        came[id(self.threads)] = time.perf_counter()
        return await answer(self, asked)

    def timed_add(self: Threads, *arguments: Any) -> Any:
        waits.append(1000 * (time.perf_counter() - came[id(self)]))
        return add(self, *arguments)

    agents_module.AgentEpisode.answer, Threads.add = timed_answer, timed_add  # type: ignore[method-assign]
    return waits


class _Samples:
    """The samples of all rounds, by what they are of."""

    def __init__(self, engine: str, rewards: Sequence[str]):
        self._stages = {kind: _Stage(kind, engine, reward) for kind, reward in zip(_KINDS, rewards, strict=True)}
        self._waits = _watch_waits()
        self.samples: dict[str, list[float]] = {}

    async def measure(self, num_rounds: int) -> None:
        for step in range(1 + num_rounds):  # one to warm up
            rows = {kind: await self._round(kind, step) for kind in self._stages}
            assert rows["agent"] == rows["python"], "both kinds sample and send the same tokens"
        for latency in (_EQUAL, _VARIED):
            pairs = zip(*(self.samples[f"{kind}, {latency} times [s]"] for kind in ("agent", "python")), strict=True)
            self.samples[f"agent / python, {latency} times"] = [agent / python for agent, python in pairs]

    async def _round(self, kind: str, step: int) -> Any:
        stage, rows = self._stages[kind], None
        await stage.open()  # an engine serves one run
        for latency in (_EQUAL, _VARIED):
            self._waits.clear()
            cpu = _cpu_s()
            seconds, rows = await stage.play(step, latency)
            if step:
                self._add(f"{kind}, {latency} times [s]", seconds)
                spent = {name: after - cpu.get(name, 0.0) for name, after in _cpu_s().items()}
                for name in ("coordinator", "reward service", "workers"):
                    per_call_ms = 1000 * spent[name] / (_NUM_EPISODES * _NUM_TURNS)
                    self._add(f"{kind}: processor time of a call, {name} [ms]", per_call_ms)
                if self._waits:
                    self._add(f"longest wait of a call for tokenizing, {latency} times [ms]", max(self._waits))
        await stage.close()
        return rows

    def _add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)


def _cpu_s() -> dict[str, float]:
    """Returns the processor time that this process, the reward services and their workers have had."""
    this, spent = psutil.Process(), {"coordinator": 0.0, "reward service": 0.0, "workers": 0.0}
    for process in [this, *this.children(recursive=True)]:
        words = process.cmdline()
        name = "coordinator" if process == this else "reward service" if "services.reward" in words else "workers"
        if "--serve" not in words:
            spent[name] += sum(process.cpu_times()[:2])
    return spent


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def main() -> None:
    """Starts the services, measures, and saves the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="agents-overhead")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(_serve())
        return
    load_before, rewards = os.getloadavg(), [_free_address() for _ in _KINDS]
    command = [sys.executable, "-m", "benchmarks.agents", "--serve"]
    services = [subprocess.Popen([sys.executable, "-m", "services.reward", "--listen", one]) for one in rewards]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdin and engine.stdout
            port = int(engine.stdout.readline())
            measured = _Samples(f"127.0.0.1:{port}", rewards)
            asyncio.run(measured.measure(arguments.rounds))
            engine.stdin.close()
    finally:
        for service in services:
            service.terminate()
            service.wait()
    settings: dict[str, Any] = {"episodes": _NUM_EPISODES, "turns": _NUM_TURNS, "latency of the engine [s]": _LATENCY_S}
    settings |= {"tokens of a turn": _TURN_TOKENS, "tokens of a reply": _REPLY_CHARS}
    settings |= {"machine_was_busy": arguments.busy, "load_before": load_before, "load_after": os.getloadavg()}
    keep(arguments.name, measured.samples, libraries=("grpcio", "aiohttp", "openai", "tokenizers"), **settings)


if __name__ == "__main__":
    main()
