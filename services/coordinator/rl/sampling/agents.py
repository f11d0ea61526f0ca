"""Plays the episodes of agents, which own their loop: answers each call of the model from exactly the episode's stamp.

A call is mapped to the tokens that it continues (text/threads.py). At the end of an episode, the calls become rows in
which each sampled token is trained once.
"""

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lockstep.reward.v1.agent_pb2 import AgentCall, AgentEnd, Begin, CallAnswer
from lockstep.types.v1.types_pb2 import Completion, FinishReason

from services.common.config.environment import AgentEnvironmentConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput, counted
from services.common.json_values import JsonMapping
from services.coordinator.clients.environment import EnvironmentFailure, Environments, EpisodeFailed
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Affinity, Rollout
from services.coordinator.data.calls import COUNTED, CallLog, Left
from services.coordinator.data.dialog import Dialog, message_of
from services.coordinator.data.groups import Episode, Row, SampledGroup, Stream
from services.coordinator.data.order import environment_seed, seed_of
from services.coordinator.data.prompts import Prompt
from services.coordinator.rl.sampling.collect import Played, PlayedCollector, PromptRequest, require_stamp, with_calls
from services.coordinator.text.threads import Call, Path, Renderer, Threads, close
from services.coordinator.text.tokenizer import Tokenizer, TooManyTokens

log = logging.getLogger(__name__)

_STOP, _LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
_MAX_WARNINGS = 12  # of different kinds


@dataclass(frozen=True)
class Sampled:
    """What a call keeps of its answer: the completion, with routed experts and sampling mask."""

    completion: Completion
    routed_experts: bytes
    sampling_mask: bytes
    body_sha256: str


class AgentCollector(PlayedCollector):
    """Collects groups whose samples are episodes of agents.

    Raises:
        InvalidInput: The model has no chat template, or reasons between other tags than those of the config.
    """

    def __init__(
        self, rollout: Rollout, rewards: Rewards, tokenizer: Tokenizer, config: Config, environments: Environments
    ):
        super().__init__(rollout, rewards, tokenizer, config, environments)
        assert isinstance(config.environment, AgentEnvironmentConfig), "make_collector has checked"
        self.settings, self.config = config.environment, config
        if not tokenizer.has_chat_template:
            message = "an agent sends messages, and the model has no chat template: set data.chat_template"
            raise InvalidInput(message, field="data.chat_template")
        self.renderer = Renderer(tokenizer, config.data.chat_template_kwargs, config.rollout.max_model_len)
        self.dialog = Dialog(tokenizer, (), config)
        self.dialog.check(())
        self._warned = set[str]()

    @property
    def has_experts(self) -> bool:
        return any(replica.returns_routed_experts for replica in self._rollout.replicas)

    async def _attempt(
        self, episode_id: str, prompt: Prompt, request: PromptRequest, sample: int, *, alone: bool
    ) -> Played:
        begin = begin_of(prompt, self.config, episode_id)
        begin.alone = alone
        episode = AgentEpisode(self, prompt, request, sample)
        try:
            end = await self._environments.play(begin, episode.answer)
        except EpisodeFailed as error:
            if not episode.has_ended_by(error):
                raise with_calls(error, self.config.run_dir, episode_id, episode.log) from error
            end = AgentEnd(exit_code=1)
        self._warn(f"prompt {prompt.prompt_id} sample {sample}", episode, end)
        return episode.played(end, self._environments.name, self.turn_seed(prompt, request, sample, 0))

    def _warn(self, which: str, episode: "AgentEpisode", end: AgentEnd) -> None:
        """Warns of what is odd about an episode, although it is no failure."""
        if refusal := end.refusal or episode.refusal:
            refused = counted(end.num_refused + episode.num_refused, "request")
            kind = re.sub(r"\d+", "", refusal)  # prompts that are too long differ in their numbers of tokens
            self._warn_once(kind, f"{which}: the endpoint refused {refused} of the agent, the last because: {refusal}")
        if end.num_retries:
            again = f"{counted(end.num_retries, 'request')} repeated one in progress and got its answer"
            self._warn_once("retries", f"{which}: {again}; to get another, set another `seed` in each")
        if self.settings.command and end.exit_code > 0 and episode.log.num_answered and not episode.is_at_limit:
            said = end.errors.strip().rpartition("\n")[2]
            ended = f"the command ended with exit code {end.exit_code}, and what it has left is scored as it is"
            self._warn_once("exit code", f"{which}: {ended}{f': {said}' if said else ''}")

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(kind)
            log.warning("%s", message)

    def _group(self, index: int, prompt: Prompt, played: Sequence[Played], request: PromptRequest) -> SampledGroup:
        segments = [
            replace(row, sample=sample)
            for sample, one in enumerate(played)
            for row in one.segments or [Row(0, prompt.tokens, one.completion, one.episode, segment=0)]
        ]
        completions, left = [one.completion for one in played], [one.left for one in played]
        ended = [one for one in left if one]
        if len(ended) > 1 and not any(one.text or one.files for one in ended):
            what = "returned a text" if self.settings.path else "left a text or files"
            message = f"prompt {prompt.prompt_id}: none of its {len(ended)} agents has {what}: scorers get an empty one"
            self._warn_once("no text", message)
        return SampledGroup(index, prompt, completions, request.stamp, segments=segments, left=left)

    async def sample(self, call: Call, episode: "AgentEpisode", limit: int, stop: Sequence[str]) -> Sampled:
        prompt, request, sample = episode.prompt, episode.request, episode.sample
        params = self.params(request, limit)
        params.stop.extend(stop)
        # By the call's prompt, and how often the same was asked before. Not by its number, because the order in which
        # concurrent calls of an agent arrive must not change what is sampled.
        key = (*call.prompt, -1, episode.threads.occurrence(call))
        seed = seed_of(self._seed, request.step, prompt.prompt_id, sample, *key)
        context = replace(prompt, tokens=call.prompt)
        group = await self._rollout.generate(0, context, [seed], params, request.stamp, episode.affinity)
        require_stamp(group, request, sample, call.number)
        self._count_drafts(group, request)
        if call.parent:
            self._counts.update(reused=len(call.parent.tokens), cached=group.num_cached_tokens)
        experts, masks = group.routed_experts, group.sampling_mask
        return Sampled(group.completions[0], experts[0] if experts else b"", masks[0] if masks else b"", "")

    def count(self, **numbers: int) -> None:
        self._counts.update(numbers)


class Model(Protocol):
    """Who answers the calls of an episode, and how they are read and rendered."""

    settings: AgentEnvironmentConfig
    config: Config
    renderer: Renderer
    dialog: Dialog

    @property
    def has_experts(self) -> bool:
        """Whether the engines return the experts that they choose."""
        ...

    async def sample(self, call: Call, episode: "AgentEpisode", limit: int, stop: Sequence[str]) -> Sampled: ...

    def count(self, **numbers: int) -> None: ...


def begin_of(prompt: Prompt, config: Config, episode_id: str) -> Begin:
    assert isinstance(config.environment, AgentEnvironmentConfig), "the run has an agent"
    columns = {name: prompt.extra[name] for name in config.environment.columns if name in prompt.extra}
    return Begin(
        episode_id=episode_id,
        seed=environment_seed(config.seed, prompt.prompt_id),
        row_json=json.dumps({"prompt": prompt.row_prompt, **columns}),
        max_model_len=config.rollout.max_model_len,
    )


class AgentEpisode:
    """One episode in progress: answers calls, and makes rows of them at the end."""

    def __init__(self, model: Model, prompt: Prompt, request: PromptRequest, sample: int):
        self._model, self._settings = model, model.settings
        self.prompt, self.request, self.sample = prompt, request, sample
        self.threads, self.affinity = Threads(model.renderer), Affinity()
        # Calls are added in the order in which they came, in a thread, because they may have to be tokenized.
        self._adding = asyncio.Lock()
        self._num_calls = self._num_tokens = 0
        self.log = CallLog()
        self._limit = ""  # the key of the limit that was reached
        self._last, self._is_cut = -1, False
        self.num_refused, self.refusal = 0, ""
        self._overlong: int | None = None  # number of the last call whose prompt was too long

    async def answer(self, asked: AgentCall) -> CallAnswer:
        said = json.loads(asked.request_json)
        entry = self.log.ask(asked, said)
        async with self._adding:
            call = await (self._count(asked, said) if asked.counts else self._add(asked, said))
        if isinstance(call, CallAnswer):
            entry["status"] = call.refusal_code or COUNTED
            return call
        self.log.keep(entry, said)
        entry |= {"parent": call.parent and call.parent.number, "after": call.after}
        room = self._model.config.rollout.max_model_len - len(call.prompt)
        left = self._settings.max_tokens - self._num_tokens
        most = min(room, left, self.request.sampling.max_tokens)
        # What the agent asks for may only lower the limit; `most` is the run's, by which an answer counts as cut off.
        limit = min(most, said["max_tokens"] or most)
        sampled = await self._model.sample(call, self, limit, said["stop"])
        completion = sampled.completion
        message, stop = message_of(self._settings, self._model.dialog, call, completion.tokens, said)
        is_cut = completion.finish_reason == _LENGTH
        reason = "length" if is_cut else "tool_calls" if "tool_calls" in message else "stop"
        async with self._adding:
            close(call, completion.tokens, message, replace(sampled, body_sha256=asked.body_sha256), stop)
            self.log.answer(entry, message, reason)
        self._num_tokens += len(completion.tokens)
        self._note_last_call(call.number, is_cut=is_cut and limit == most)
        return CallAnswer(
            call=asked.number,
            message_json=json.dumps(message),
            finish_reason=reason,
            num_prompt_tokens=len(call.prompt),
            num_sampled_tokens=len(completion.tokens),
            stop_sequence=stop,
        )

    async def _count(self, asked: AgentCall, said: JsonMapping) -> CallAnswer:
        """Returns the number of tokens that the prompt of this request would have."""
        if self._limit:
            return self._refuse_after_end(asked)
        try:
            call = await asyncio.to_thread(self.threads.place, asked.number, said["messages"], said["tools"])
        except InvalidInput as error:
            return self._refuse_prompt(asked, error)
        return CallAnswer(call=asked.number, num_prompt_tokens=len(call.prompt))

    async def _add(self, asked: AgentCall, said: JsonMapping) -> Call | CallAnswer:
        settings, model = self._settings, self._model
        model.count(overridden=bool(asked.overridden))
        if not self._limit and self._num_calls >= settings.max_calls:
            self._limit = "max_calls"
        if not self._limit and self._num_tokens >= settings.max_tokens:
            self._limit = "max_tokens"
        if self._limit:
            return self._refuse_after_end(asked)
        self._num_calls += 1  # one that is refused counts too, or an agent that ignores it would go on until episode_s
        if said["stop"] and (why := self._refuses_stop()):
            return self._refuse(asked, why, "unsupported_stop")
        try:
            call = await asyncio.to_thread(self.threads.add, asked.number, said["messages"], said["tools"])
        except InvalidInput as error:
            return self._refuse_prompt(asked, error)
        most = model.config.rollout.max_model_len
        if self.threads.num_segments > settings.max_segments:
            self._limit = "max_segments"
            self.threads.drop(call)
            return self._refuse_after_end(asked)
        if len(call.prompt) >= most:
            self.threads.drop(call)
            return self._refuse_prompt(asked, TooManyTokens(most, str(len(call.prompt))))
        return call

    def _refuse_prompt(self, asked: AgentCall, error: InvalidInput) -> CallAnswer:
        if not isinstance(error, TooManyTokens):
            return self._refuse(asked, error.message, "invalid_messages")
        if not asked.counts:
            self._note_last_call(asked.number, is_cut=True)
            self._overlong = asked.number
        return self._refuse(asked, error.message, "context_length_exceeded")

    def _refuses_stop(self) -> str:
        """Returns why a call with texts that end its answer is refused; empty if it is not."""
        needed = ""
        if self.request.has_masks:
            needed = (
                "sampling masks that rollout.sampling.top_k needs; leave it out, or set that and min_p to 0, top_p to 1"
            )
        elif self.request.is_trained_on and self._model.has_experts:
            needed = "routed experts that trainer.moe.router_replay needs; leave it out, or set that to off"
        return needed and f"stop (stop_sequences): an answer that ends at such a text comes without the {needed}"

    def _note_last_call(self, number: int, *, is_cut: bool) -> None:
        """Remembers whether the last call was cut off by a limit of the run, and not by the agent's own."""
        if number >= self._last:
            self._last, self._is_cut = number, is_cut

    def _refuse_after_end(self, asked: AgentCall) -> CallAnswer:
        reached = f"environment.{self._limit} ({getattr(self._settings, self._limit)}): raise that for longer ones"
        refusal = self._refuse(asked, f"the episode is over: it has reached {reached}", "episode_over")
        refusal.is_over = True
        return refusal

    def _refuse(self, asked: AgentCall, message: str, code: str) -> CallAnswer:
        self._model.count(refused_calls=1)
        self.num_refused += 1
        if not self._limit:  # that the episode is over says less than why the calls before were refused
            self.refusal = message
        return CallAnswer(call=asked.number, refusal=message, refusal_code=code)

    @property
    def is_at_limit(self) -> bool:
        """Whether the last call was refused, or would be, because of a limit of the run."""
        return bool(self._limit) or self._overlong == self._last

    def has_ended_by(self, error: EpisodeFailed) -> bool:
        """Returns whether a function has ended with an error because a call was refused at a limit: an outcome.

        Clients raise an error for a refusal, and not every agent catches it. The end of a worker process, which is to
        be played again `alone`, stays a failure.
        """
        is_of_function = bool(self._settings.path) and error.failure is EnvironmentFailure.CRASHED and not error.alone
        return is_of_function and self.is_at_limit and bool(self.threads.paths())

    def played(self, end: AgentEnd, environment: str, seed: int) -> Played:
        """Returns the episode once the agent has ended. Raises EpisodeFailed if the model has answered no call."""
        paths = self.threads.paths()
        self._model.count(refused_calls=end.num_refused)
        if not paths:
            why = "never called the model, or only with another key than its own"
            if end.num_refused:
                why = f"got {counted(end.num_refused, 'request')} refused by the endpoint, because: {end.refusal}"
            if self.num_refused:
                why = f"no answer of the model ({counted(self.num_refused, 'call')} refused, because: {self.refusal})"
            said = f"{end.text[:200]!r} {end.errors}".rstrip()
            detail = f"the agent ended with exit code {end.exit_code} and {why}: {said}"
            raise EpisodeFailed(EnvironmentFailure.INVALID_REPLY, detail)
        self._model.count(retries=end.num_retries, nonzero_exits=bool(self._settings.command and end.exit_code))
        reason = _LENGTH if self._is_cut else _STOP
        # An answer that was cut off stays the end if only further calls were refused.
        if self._limit and (not self._is_cut or self._overlong == self._last):
            reason = _LENGTH if self._limit == "max_tokens" else FinishReason.FINISH_REASON_TURN_LIMIT
        rows = [_row(path, segment, reason, seed, environment) for segment, path in enumerate(paths)]
        left = Left(end.text, end.exit_code, dict(end.files), self._num_tokens, self.log)
        whole = Completion(finish_reason=reason, seed=seed)
        return Played(self.prompt, whole, Episode((), (), (), environment), segments=rows, left=left)


def _row(path: Path, segment: int, reason: FinishReason, seed: int, environment: str) -> Row:
    stream = Stream(path.calls[0].prompt)
    for call in path.calls:
        sampled: Sampled = call.facts
        if call is not path.calls[0]:
            stream.add_context(call.added)
        stream.add_turn(sampled.completion, sampled.routed_experts, sampled.sampling_mask)
        stream.rewards.append(0.0)
    completion, episode = stream.end(reason, seed, environment)
    return Row(
        0,
        stream.prompt,
        completion,
        episode,
        bytes(stream.routed_experts) or None,
        stream.joined_sampling_mask or None,
        segment,
        [
            {"number": call.number, "parent": call.parent and call.parent.number, "sha256": call.facts.body_sha256}
            for call in path.calls
        ],
        path.num_repeated,
    )
