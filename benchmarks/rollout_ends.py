"""Runs the two ends of `benchmarks.rollout`: the rollout service as the coordinator uses it, and vLLM's LLM alone."""

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.reward.v1.reward_pb2 import Score
from lockstep.types.v1.types_pb2 import PolicyStamp

from benchmarks.publishing import open_publisher
from services.common.config.rollout import SamplingConfig
from services.common.config.run import Config
from services.common.tasks import gather
from services.coordinator.clients.reward import FailureLog
from services.coordinator.clients.rollout import Rollout
from services.coordinator.clients.trainer import Trainer
from services.coordinator.data.groups import SampledGroup, ScoredGroup
from services.coordinator.data.order import seed_of
from services.coordinator.data.prompts import Prompt
from services.coordinator.fleet.launch import Addresses, launch
from services.coordinator.fleet.running import unless_one_dies
from services.coordinator.rl.sampling.collect import Collector
from services.coordinator.text.tokenizer import Tokenizer

_LINE_BYTES, _GRACE_S = 64 << 20, 10.0


@dataclass(frozen=True)
class Batch:
    """Holds prompts, and the seeds of each prompt's samples."""

    prompts: Sequence[Prompt]
    seeds: Sequence[Sequence[int]]
    sampling: SamplingConfig


@dataclass(frozen=True)
class Drawn:
    """Holds the results of a batch. A group is finished when its last sample is."""

    duration_s: float
    num_tokens: int
    finished_s: Sequence[float]
    """Seconds from the start of the batch to the end of each group."""
    cpu_s: Mapping[str, float]

    def numbers(self, num_samples: int) -> dict[str, float]:
        """Returns the quantities by the names that `benchmarks.report` uses."""
        finished_s = sorted(self.finished_s)
        most_s = finished_s[math.ceil(0.9 * len(finished_s)) - 1]
        cpu = {f"CPU of {who} [s per 1000 samples]": spent / num_samples * 1e3 for who, spent in self.cpu_s.items()}
        return {
            "tokens/s": self.num_tokens / self.duration_s,
            "duration [s]": self.duration_s,
            "first group [s]": finished_s[0],
            "last 10 % of the samples, by group [share of time]": 1 - most_s / self.duration_s,
            **cpu,
        }


class _Clock:
    """Replaces the reward client and records when each group arrived."""

    def __init__(self, config: Config) -> None:
        self.failure_log = FailureLog(config)
        self.finished_s: list[float] = []
        self.num_tokens = 0

    def take_failures(self) -> dict[str, float]:
        return {}

    async def score(self, group: SampledGroup, tokenizer: Tokenizer, *, keep_failed: bool) -> ScoredGroup:
        self.finished_s.append(time.perf_counter())
        self.num_tokens += sum(len(completion.tokens) for completion in group.completions)
        return ScoredGroup(**vars(group), scores=[Score()] * len(group.completions), scorer="clock")


class Service:
    """Samples from replicas with published weights, through the coordinator's own collector and dispatch."""

    def __init__(self, rollout: Rollout, config: Config, stamp: PolicyStamp, pids: Sequence[int]):
        self.rollout, self._config, self.stamp, self._pids = rollout, config, stamp, pids

    def batch(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> Batch:
        """Returns a batch with the seeds that the collector will use."""
        samples, place = range(self._config.rollout.completions_per_prompt), (self._config.seed, self.stamp.version)
        seeds = [[seed_of(*place, prompt.prompt_id, sample) for sample in samples] for prompt in prompts]
        return Batch(prompts, seeds, sampling)

    async def draw(self, batch: Batch) -> Drawn:
        """Samples the whole `batch`."""
        clock, cpu_s = _Clock(self._config), self.cpu_seconds()
        num_samples = self._config.rollout.completions_per_prompt
        begin = time.perf_counter()
        await self._collector(clock).collect("all", batch.prompts, num_samples, batch.sampling, self.stamp)
        duration_s, spent = time.perf_counter() - begin, self.cpu_seconds()
        finished_s = [finished - begin for finished in clock.finished_s]
        return Drawn(duration_s, clock.num_tokens, finished_s, {who: spent[who] - cpu_s[who] for who in spent})

    def _collector(self, clock: _Clock) -> Collector:
        reward: Any = clock
        tokenizer: Any = SimpleNamespace(eos_token_ids=())
        return Collector(self.rollout, reward, tokenizer, self._config.seed)

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the CPU time so far of the replicas' frontends, their engines, and this process."""
        return _cpu_seconds(self._pids) | {"coordinator": time.process_time()}


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Service]:
    """Starts a trainer and `rollout.num_replicas` replicas, and publishes the trainer's weights to them."""
    async with launch(config, Addresses(reward=("127.0.0.1:1",))) as fleet:
        trainer, rollout = Trainer(fleet.addresses.trainer, config), Rollout(fleet.addresses.rollout, config)
        try:
            async with unless_one_dies(fleet):
                stamp = await _publish(trainer, rollout, config)
            replicas = [child.process for child in fleet.children if child.name.startswith("rollout")]
            pids = [process.pid for process in replicas if process]
            yield Service(rollout, config, stamp, pids)
        finally:
            await gather([trainer.close(), rollout.close()])


async def _publish(trainer: Trainer, rollout: Rollout, config: Config) -> PolicyStamp:
    publisher, version = await open_publisher(trainer, rollout, config, "rollout")
    return await publisher.publish(version)


class Bare:
    """Samples from vLLM's LLM in a process of its own (benchmarks.rollout_bare)."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self.settings: dict[str, Any] = {}

    async def open(self, config: Config) -> None:
        """Starts the engine."""
        opening = {"config_json": config.rollout.model_dump_json(), "model": config.model, "seed": config.seed}
        self.settings = await self._ask(opening)

    async def draw(self, batch: Batch) -> Drawn:
        """Samples the whole `batch`."""
        pairs = zip(batch.prompts, batch.seeds, strict=True)
        requests = [(prompt.tokens, seed) for prompt, seeds in pairs for seed in seeds]
        sampling, cpu_s = batch.sampling, self._cpu_seconds()
        asked = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
        answer = await self._ask({"sampling": asked, "requests": requests})
        spent, finished_s, size = self._cpu_seconds(), answer["finished_s"], len(batch.seeds[0])
        groups = [max(finished_s[start : start + size]) for start in range(0, len(finished_s), size)]
        cpu_s = {who: spent[who] - cpu_s[who] for who in spent}
        return Drawn(answer["duration_s"], answer["num_tokens"], groups, cpu_s)

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()
        if not (line := await self._process.stdout.readline()):
            raise RuntimeError(f"bare vLLM exited with code {await self._process.wait()}; see its log")
        return json.loads(line)

    def _cpu_seconds(self) -> dict[str, float]:
        return _cpu_seconds([self._process.pid])


@asynccontextmanager
async def bare_engine(config: Config, gpu: str | None) -> AsyncIterator[Bare]:
    """Starts vLLM's LLM on `gpu` of this host, with the engine arguments of the service."""
    env = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    with (config.run_dir / "logs" / "bare.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.rollout_bare", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=_LINE_BYTES,
            env=env,
            start_new_session=True,
        )
    assert process.stdin, "it is a pipe"
    try:
        bare = Bare(process)
        await bare.open(config)
        yield bare
    finally:
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
        with contextlib.suppress(ProcessLookupError):  # the session is empty
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _cpu_seconds(pids: Sequence[int]) -> dict[str, float]:
    """Returns the CPU time of these processes, which run vLLM's frontend, and of all engines that they started."""
    below = [pid for parent in pids for pid in _below(parent)]
    return {"frontend": sum(map(_spent, pids)), "engine": sum(map(_spent, below))}


def _spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _below(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield int(child)
            yield from _below(int(child))
