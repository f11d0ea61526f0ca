"""Plays agents with the real reward service, endpoint, sandbox and collector, and an engine that says what tests want.

The engine logs every prompt that it gets and every token that it samples.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from lockstep.reward.v1 import agent_pb2_grpc, reward_pb2_grpc
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.types.v1.types_pb2 import FINISH_REASON_STOP, Completion, ModelCard, PolicyStamp

from services.common.batches import tokens_sha256
from services.common.config.rollout import SamplingConfig
from services.common.rpc.server import Server
from services.common.rpc.transfer import seal
from services.coordinator.clients.environment import Environments
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Rollout
from services.coordinator.data.groups import ScoredGroup, to_table
from services.coordinator.data.prompts import Prompt
from services.coordinator.rl.sampling.agents import AgentCollector
from services.coordinator.rl.sampling.collect import PromptRequest
from services.coordinator.text.tokenizer import Tokenizer
from services.reward.agents.runners import Place
from services.reward.servicer import RewardServicer
from tests.coordinator.fake_services import FakeReplica, make_config
from tests.coordinator.text.bridge_families import TEMPLATES, make_tokenizer

STAMP = PolicyStamp(version=2, digest="d" * 32)
END = "<|im_end|>"
MAX_MODEL_LEN = 4096


ASK = """
import json, os, urllib.request
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def make_chat_tokenizer() -> Tokenizer:
    """Returns a small tokenizer with a chat template that keeps earlier turns and takes tools."""
    return make_tokenizer((TEMPLATES / "qwen2.5.jinja").read_text(), eos=(END, "<|endoftext|>"))


Says = Callable[[str, int], "str | Sequence[int]"]
"""Returns the model's next text, or tokens, for the text of a prompt and a seed."""


class ScriptedReplica(FakeReplica):
    """An engine that says `says(text of the prompt, seed)`, and logs prompts and sampled tokens.

    Its answers have the stamp that was committed last, whatever was asked for.
    """

    def __init__(self, tokenizer: Tokenizer, says: Says, **options: Any):
        super().__init__(**options)
        self.tokenizer, self.says = tokenizer, says
        self.log: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.delay: Callable[[str], Any] | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self._fail("Generate")
        (prompt,) = request.prompts
        text = self.tokenizer.decode(prompt.tokens, skip_special_tokens=False)
        self.in_flight += 1
        try:
            await (self.delay(text) if self.delay else asyncio.sleep(0))
        finally:
            self.in_flight -= 1
        said = self.says(text, prompt.seeds[0])
        tokens = [*(self.tokenizer.encode(said + END) if isinstance(said, str) else said)]
        reason = FINISH_REASON_STOP
        if len(tokens) > request.sampling.max_tokens:
            tokens, reason = tokens[: request.sampling.max_tokens], 2
        self.log.append((tuple(prompt.tokens), tuple(tokens)))
        logprobs = [-1.0 - index for index in range(len(tokens))]
        yield seal(
            request,
            pb.GenerateResponse(
                prompt_id=prompt.prompt_id,
                completions=[Completion(tokens=tokens, logprobs=logprobs, finish_reason=reason, seed=prompt.seeds[0])],
                stamp=self.committed[-1],
                prompt_num_tokens=len(prompt.tokens),
                prompt_sha256=tokens_sha256(prompt.tokens),
            ),
        )


def is_running(mark: str) -> list[str]:
    """Returns the processes of this host whose command line has `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in path.read_bytes().decode(errors="replace"):
                found.append(str(path))
        except OSError:
            continue
    return found


@dataclass
class Stage:
    """A collector of agents' episodes over one scripted engine and one real reward service."""

    collector: AgentCollector
    engines: Sequence[ScriptedReplica]
    servicer: RewardServicer
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=200))

    @property
    def engine(self) -> ScriptedReplica:
        return self.engines[0]

    async def play(
        self, question: str = "Q", *, answer: str = "4", num_samples: int = 1, keep_failed: bool = False, **extra: Any
    ) -> ScoredGroup | None:
        """Plays and scores one prompt group."""
        messages = ({"role": "user", "content": question},)
        prompt = Prompt("p0", question, (5,), answer, extra, messages, question)
        request = PromptRequest(num_samples, self.sampling, STAMP, STAMP.version, keep_failed=keep_failed)
        async with asyncio.timeout(60):
            return await self.collector.one(0, prompt, request)

    async def rows(self, question: str = "Q", **options: Any) -> list[dict[str, Any]]:
        """Plays one prompt group, and returns its rows of a batch."""
        group = await self.play(question, **options)
        assert group is not None
        return table_of(group).to_pylist()


def table_of(*groups: ScoredGroup) -> pa.Table:
    return to_table(groups)


def trained(row: dict[str, Any]) -> list[list[int]]:
    """Returns the tokens of each turn of a row that is trained there."""
    turns = zip(row["turn_begins"], row["turn_ends"], strict=True)
    return [row["tokens"][begin:end] for begin, end in turns if any(row["loss_mask"][begin:end])]


@contextlib.asynccontextmanager
async def staged(
    says: Says,
    *,
    scorers: Sequence[dict[str, Any]] = (),
    num_replicas: int = 1,
    service: str = "",
    place: Place | None = None,
    **environment: Any,
) -> AsyncIterator[Stage]:
    """Yields a stage whose agent has the config `environment`.

    The reward service is in this process, unless it is that at the address `service`, and listens at `place`.
    """
    directory = tempfile.TemporaryDirectory()
    config = make_config(
        runs_dir=directory.name,
        environment={
            "kind": "agent",
            "num_workers": 1,
            "episode_s": 60,
            "max_retries": 0,
            "on_failure": "fail",
            **environment,
        },
        rollout={"max_model_len": MAX_MODEL_LEN, "sampling": {"max_tokens": 200}},
        data={"train": "x.parquet", "prompts_per_step": 8, "max_prompt_tokens": 16},
        reward={"scorers": list(scorers) or [{"kind": "exact"}], "on_failure": "fail", "group_timeout_s": 60},
    )
    tokenizer = make_chat_tokenizer()
    server, servicer = Server(), RewardServicer(place=place)
    engines = [ScriptedReplica(tokenizer, says) for _ in range(num_replicas)]
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server.grpc)
    agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer.agents, server.grpc)
    port = await server.start("127.0.0.1:0", ["lockstep.reward.v1.RewardService"])
    for engine in engines:
        await engine.start()
    rollout = Rollout([engine.address for engine in engines], config)
    rewards = Rewards([service or f"127.0.0.1:{port}"], config)
    try:
        await rollout.open("run", ModelCard())
        await rewards.open("run")
        for replica in rollout.replicas:
            await replica.commit(STAMP)
        assert config.environment
        environments = Environments(rewards, config.environment)
        yield Stage(AgentCollector(rollout, rewards, tokenizer, config, environments), engines, servicer)
        await environments.close()
    finally:
        await rollout.close()
        await rewards.close()
        for engine in engines:
            await engine.die()
        await servicer.close()
        await server.grpc.stop(0)
        directory.cleanup()
