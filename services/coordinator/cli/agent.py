"""Plays an episode of an agent whose model you are, for `lockstep env try`."""

import asyncio
import json
from collections.abc import Iterator, Sequence

from lockstep.reward.v1.agent_pb2 import AgentEnd, Begin, PlayRequest, PlayResponse
from lockstep.types.v1.types_pb2 import Completion, FinishReason, PolicyStamp
from rich.console import Console

from services.common.config.environment import AgentEnvironmentConfig
from services.common.config.run import Config
from services.common.counted import counted
from services.common.json_values import JsonMapping
from services.coordinator.clients.environment import episode_failed
from services.coordinator.data.dialog import Dialog
from services.coordinator.data.prompts import Prompt
from services.coordinator.fleet.probes import AgentProbe
from services.coordinator.rl.sampling.agents import AgentEpisode, Sampled, begin_of
from services.coordinator.rl.sampling.collect import PromptRequest
from services.coordinator.text.threads import Call, Renderer
from services.coordinator.text.tokenizer import Tokenizer


class NoMoreTurnsError(Exception):
    """The model has nothing more to say."""


class TypedModel:
    """Answers calls with texts, and shows the calls. Everything else is as in a run."""

    def __init__(self, config: Config, tokenizer: Tokenizer, turns: Iterator[str], console: Console):
        assert isinstance(config.environment, AgentEnvironmentConfig), "the caller has checked"
        self.config, self.settings = config, config.environment
        self.renderer = Renderer(tokenizer, config.data.chat_template_kwargs)
        self.dialog = Dialog(tokenizer, (), config)
        self._tokenizer, self._turns, self._console = tokenizer, turns, console

    @property
    def has_experts(self) -> bool:
        return False  # which only an engine could tell

    async def sample(self, call: Call, episode: AgentEpisode, limit: int, stop: Sequence[str]) -> Sampled:
        place = "begins a segment" if call.parent is None else f"continues call {call.parent.number}"
        tools = ", ".join(tool["function"]["name"] for tool in json.loads(call.tools))
        size = f"{len(call.prompt)} tokens{f', tools {tools}' if tools else ''}"
        self._console.print(f"--- call {call.number} {place}: {size}", soft_wrap=True)
        for message in call.conversation[len(call.parent.conversation) if call.parent else 0 :]:
            _show_message(self._console, message)
        if (text := next(self._turns, None)) is None:
            raise NoMoreTurnsError
        tokens = [*self._tokenizer.encode(text), self._tokenizer.eos_token_ids[0]]
        is_cut = len(tokens) > limit
        tokens = tokens[:limit]
        reason = FinishReason.FINISH_REASON_LENGTH if is_cut else FinishReason.FINISH_REASON_STOP
        completion = Completion(tokens=tokens, logprobs=[0.0] * len(tokens), finish_reason=reason)
        return Sampled(completion, b"", b"", "")

    def count(self, **numbers: int) -> None: ...


def play_agent(probe: AgentProbe, model: TypedModel, prompt: Prompt, console: Console) -> bool:
    """Plays an episode of the open agent, and prints its calls and its end. Returns whether nothing failed."""
    request = PromptRequest(1, model.config.rollout.sampling, PolicyStamp(), 0)
    episode = AgentEpisode(model, prompt, request, 0)
    try:
        last = asyncio.run(_play(probe, episode, begin_of(prompt, model.config, "try"), console))
    except NoMoreTurnsError:
        console.print("no more turns of the policy: the episode was left")
        return True
    paths, end = episode.threads.paths(), last.end
    if last.HasField("failure"):
        failed, end = episode_failed(last.failure), AgentEnd(exit_code=1)
        console.print(failed.message, soft_wrap=True)
        if not episode.has_ended_by(failed):
            return False
        console.print("a call was refused at a limit, so a run scores the episode as it is")
    num_calls = sum(len(path.calls) - path.num_repeated for path in paths)
    segments = ", ".join(str([call.number for call in path.calls]) for path in paths)
    console.print(
        f"--- exit code {end.exit_code}; {counted(num_calls, 'call')} in {counted(len(paths), 'segment')}: {segments}"
    )
    for path, content in sorted(end.files.items()):
        console.print(f"collected {path}, {counted(len(content), 'byte')}", soft_wrap=True)
    say(console, "final text", end.text)
    return True


async def _play(probe: AgentProbe, episode: AgentEpisode, begin: Begin, console: Console) -> PlayResponse:
    """Answers the calls of an episode one after the other. Returns the last message of the agent."""
    response = probe.play(PlayRequest(begin=begin))
    while response.HasField("call"):
        call, answer = response.call, await episode.answer(response.call)
        if answer.refusal:
            refusal = f"is refused, {answer.refusal_code}: {answer.refusal}"
            console.print(f"--- call {call.number} {refusal}", soft_wrap=True)
        elif call.counts:
            console.print(f"--- call {call.number} counts {answer.num_prompt_tokens} tokens", soft_wrap=True)
        else:
            _show_message(console, json.loads(answer.message_json))
        response = probe.play(PlayRequest(answer=answer))
    return response


def _show_message(console: Console, message: JsonMapping) -> None:
    if reasoning := message.get("reasoning"):
        say(console, "reasoning", reasoning)
    if message["content"] or not message.get("tool_calls"):
        say(console, message["role"], message["content"])
    for call in message.get("tool_calls", ()):
        say(console, "calls", f"{call['name']}({call['arguments']})")


def say(console: Console, who: str, text: str) -> None:
    console.print(f"[{who or 'text'}] {text}", soft_wrap=True)
