"""Plays agents without any process or socket: the dialects and the collector are real, the engine draws tokens.

An agent is written once and speaks each dialect as its clients do, which send back what they were given.
"""

import asyncio
import contextlib
import contextvars
import copy
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from lockstep.reward.v1.agent_pb2 import AgentCall, AgentEnd
from lockstep.reward.v1.reward_pb2 import Score
from lockstep.types.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Completion

from services.common.config.rollout import SamplingConfig
from services.coordinator.data.groups import SampledGroup, ScoredGroup, to_table
from services.coordinator.data.prompts import Prompt
from services.coordinator.rl.sampling.agents import AgentCollector
from services.coordinator.rl.sampling.collect import PromptRequest
from services.reward.agents.anthropic import Messages
from services.reward.agents.dialect import Drops
from services.reward.agents.openai import Chat, Responses
from tests.agents.harness import MAX_MODEL_LEN, STAMP, make_chat_tokenizer
from tests.coordinator.fake_services import make_config

Json = dict[str, Any]
Tokens = tuple[int, ...]
TOKENIZER = make_chat_tokenizer()
SCHEMA: Json = {"type": "object", "properties": {"a": {}, "b": {}}}
NUMBER = contextvars.ContextVar[int]("number")
"""The call that is in progress."""


@contextlib.contextmanager
def caught(mutant: str) -> Iterator[None]:
    """Expects the checks within to fail if there is a mutant."""
    with pytest.raises(AssertionError) if mutant else contextlib.nullcontext():
        yield


@dataclass
class Engine:
    """Stands for the replicas. Logs the prompt and the tokens of each call by its number."""

    draws: Callable[[], Sequence[int]]
    chance: random.Random
    log: dict[int, tuple[Tokens, Tokens]] = field(default_factory=dict)
    replicas: Sequence[Any] = ()

    async def generate(
        self, index: int, prompt: Prompt, seeds: Sequence[int], params: Any, stamp: Any, affinity: Any = None
    ) -> SampledGroup:
        for _ in range(self.chance.randrange(4)):  # calls in progress are answered in any order
            await asyncio.sleep(0)
        tokens = tuple(self.draws())[: params.max_tokens]
        self.log[NUMBER.get()] = tuple(prompt.tokens), tokens
        reason = FINISH_REASON_STOP if tokens[-1] in TOKENIZER.eos_token_ids else FINISH_REASON_LENGTH
        logprobs = [-1.0 - self.chance.random() for _ in tokens]
        completion = Completion(tokens=tokens, logprobs=logprobs, finish_reason=reason, seed=seeds[0])
        return SampledGroup(index, prompt, [completion], stamp)


class Speaker:
    """What a client of one dialect sends and keeps."""

    def __init__(self, name: str):
        self.name = name
        self.dialect = {"chat": Chat, "messages": Messages, "responses": Responses}[name]()

    def body(self, history: Sequence[Json], system: str, *, with_tools: bool) -> Json:
        tool = {"name": "add", "description": "Adds."}
        if self.name == "messages":
            body: Json = {"messages": history, "max_tokens": 4000, **({"system": system} if system else {})}
            return body | ({"tools": [{**tool, "input_schema": SCHEMA}]} if with_tools else {})
        function = {**tool, "parameters": SCHEMA}
        if self.name == "responses":
            body = {"input": history, **({"instructions": system} if system else {})}
            return body | ({"tools": [{"type": "function", **function}]} if with_tools else {})
        first = [{"role": "system", "content": system}] if system else []
        tools = {"tools": [{"type": "function", "function": function}]} if with_tools else {}
        return {"messages": [*first, *history], **tools}

    def echo(self, answer: Json) -> list[Json]:
        """Returns an answer as the history has it."""
        if self.name == "messages":
            return [{"role": "assistant", "content": answer["content"]}]
        return answer["output"] if self.name == "responses" else [answer["choices"][0]["message"]]

    def call_ids(self, answer: Json) -> list[str]:
        if self.name == "messages":
            return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        if self.name == "responses":
            return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        return [call["id"] for call in answer["choices"][0]["message"].get("tool_calls", ())]

    def result(self, call_id: str, text: str) -> Json:
        if self.name == "messages":
            block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
            return {"role": "user", "content": [block]}
        if self.name == "responses":
            return {"type": "function_call_output", "call_id": call_id, "output": text}
        return {"role": "tool", "tool_call_id": call_id, "content": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def edited(items: Sequence[Json]) -> list[Json]:
    """Returns an answer of which one character, or the arguments of a call, were changed."""
    changed = copy.deepcopy(list(items))
    part = changed[-1]
    while isinstance(content := part.get("content"), list):
        part = content[-1]
    if calls := part.get("tool_calls"):
        calls[0]["function"]["arguments"] = '{"a": "edited"}'
    elif "arguments" in part:
        part["arguments"] = '{"a": "edited"}'
    elif "input" in part:
        part["input"] = {"a": "edited"}
    else:
        key = "text" if "text" in part else "content"
        part[key] = (part[key] or "") + "x"
    return changed


Ask = Callable[..., Awaitable[tuple[int, Json]]]
Agent = Callable[[Speaker, Ask], Awaitable[None]]


async def play(agent: Agent, engine: Engine, dialect: str, **environment: Any) -> list[Json]:
    """Plays one episode, and returns its rows of a batch."""
    speaker = Speaker(dialect)

    async def run(begin: object, answer: Callable[[AgentCall], Awaitable[Any]]) -> AgentEnd:
        numbers = iter(range(10**6))

        async def ask(history: Sequence[Json], system: str = "", *, with_tools: bool = True) -> tuple[int, Json]:
            body = json.dumps(speaker.body(history, system, with_tools=with_tools)).encode()
            read, number = speaker.dialect.read(body, Drops()), next(numbers)
            sha256 = hashlib.sha256(body).hexdigest()
            call = AgentCall(number=number, request_json=json.dumps(read.neutral), body_sha256=sha256)
            NUMBER.set(number)
            answered = await answer(call)
            assert not answered.refusal, answered.refusal
            # As clients write it in their next request: strict JSON, and UTF-8 without escapes.
            written = json.dumps(speaker.dialect.answer(answered), ensure_ascii=False, allow_nan=False).encode()
            return number, json.loads(written)

        await agent(speaker, ask)
        return AgentEnd(text="done")

    config = make_config(
        environment={"kind": "agent", "path": "m:run", "max_calls": 10**4, "max_segments": 10**4, **environment},
        rollout={"max_model_len": MAX_MODEL_LEN, "sampling": {"max_tokens": 200}},
    )
    services: Any = SimpleNamespace(failure_log=None, play=run, name="agent 1/x")
    collector = AgentCollector(engine, services, TOKENIZER, config, services)  # type: ignore[arg-type]
    prompt = Prompt("p0", "Q", (5,), "4", {}, (user("Q"),), "Q")
    request = PromptRequest(1, SamplingConfig(max_tokens=200), STAMP, STAMP.version)
    played = await collector._attempt("e", prompt, request, 0, alone=False)
    group = collector._group(0, prompt, [played], request)
    return to_table([ScoredGroup(**vars(group), scores=[Score(reward=1.0)], scorer="s 1")]).to_pylist()


def everything_is_trained_once(engine: Engine, rows: Sequence[Json]) -> None:
    """Checks that the trained spans of the rows, each after its context, are exactly the engine's log."""
    trained, logged = [], sorted(engine.log.values())
    for row in rows:
        for begin, end, call in zip(row["turn_begins"], row["turn_ends"], row["calls"], strict=True):
            span = (*row["prompt_tokens"], *row["tokens"][:begin]), tuple(row["tokens"][begin:end])
            assert engine.log[call["number"]] == span
            mask = row["loss_mask"][begin:end]
            assert len(set(mask)) == 1, "a turn is trained as a whole or not at all"
            trained += [span] if mask[0] else []
        outside = [True] * len(row["tokens"])
        for begin, end in zip(row["turn_begins"], row["turn_ends"], strict=True):
            outside[begin:end] = [False] * (end - begin)
        assert not any(on and out for on, out in zip(row["loss_mask"], outside, strict=True)), "the agent's tokens"
    assert sorted(trained) == logged
