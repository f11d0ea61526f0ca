"""Plays episodes: the policy and an environment take turns on one stream of tokens, all sampled from one stamp."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from lockstep.reward.v1.environment_pb2 import Message
from lockstep.types.v1.types_pb2 import FinishReason

from services.common.config.environment import BaseEnvironmentConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.common.rewards import weighted_sum
from services.coordinator.clients.environment import EnvironmentFailure, Environments, EpisodeClient, EpisodeFailed
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Affinity, Rollout
from services.coordinator.data.dialog import Dialog, OverlongPrompt
from services.coordinator.data.groups import SampledGroup, Stream
from services.coordinator.data.order import environment_seed
from services.coordinator.data.prompts import Prompt
from services.coordinator.fleet.opening import Services
from services.coordinator.rl.sampling.agents import AgentCollector
from services.coordinator.rl.sampling.collect import Collector, Played, PlayedCollector, PromptRequest, require_stamp
from services.coordinator.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Taken = tuple[Sequence[int], Sequence[Message]]
"""The policy's tokens of a turn, with the environment's reply."""
_NUM_COMPARED = 32
"""Number of episodes of several turns that are rendered again, after each start."""


class EpisodeCollector(PlayedCollector):
    """Collects groups whose samples are episodes of turns."""

    def __init__(
        self, rollout: Rollout, rewards: Rewards, tokenizer: Tokenizer, config: Config, environments: Environments
    ):
        super().__init__(rollout, rewards, tokenizer, config, environments)
        assert isinstance(config.environment, BaseEnvironmentConfig), "make_collector has checked"
        self._settings = config.environment
        self._drops_overlong = config.data.overlong == "drop"
        self._dialog, self._max_tokens = make_dialog(tokenizer, environments, config), config.max_response_tokens
        self._to_compare, self._differs = _NUM_COMPARED, False

    async def _attempt(
        self, episode_id: str, prompt: Prompt, request: PromptRequest, sample: int, *, alone: bool
    ) -> Played:
        async with self._environments.episode(episode_id) as client:
            return await self._take_turns(client, prompt, request, sample, alone=alone)

    def _group(self, index: int, prompt: Prompt, played: Sequence[Played], request: PromptRequest) -> SampledGroup:
        routed_experts = [one.routed_experts for one in played]
        sampling_masks = [one.sampling_mask for one in played]
        return SampledGroup(
            index,
            _shared_prompt(played),
            [one.completion for one in played],
            request.stamp,
            episodes=[one.episode for one in played],
            routed_experts=routed_experts if any(routed_experts) else [],
            sampling_mask=sampling_masks if any(sampling_masks) else [],
        )

    async def _take_turns(
        self, client: EpisodeClient, prompt: Prompt, request: PromptRequest, sample: int, *, alone: bool
    ) -> Played:
        messages = await client.reset(environment_seed(self._seed, prompt.prompt_id), prompt, alone=alone)
        first = self._begin(prompt, messages)
        stream, affinity = Stream(first.tokens), Affinity()
        reason = FinishReason.FINISH_REASON_TURN_LIMIT
        taken: list[Taken] = []
        for turn in range(self._settings.max_turns):
            context = replace(first, tokens=stream.context)
            params = self.params(request, self._max_tokens - len(stream.tokens))
            seeds = [self.turn_seed(prompt, request, sample, turn)]
            group = await self._rollout.generate(0, context, seeds, params, request.stamp, affinity)
            require_stamp(group, request, sample, turn)
            (completion,) = group.completions
            self._count_drafts(group, request)
            if turn:
                self._counts.update(reused=stream.num_seen, cached=group.num_cached_tokens)
            stream.add_turn(completion, *(group.routed_experts or [b""]), *group.sampling_mask)
            text = self._dialog.text(completion.tokens)
            reasons = self._dialog.opens_reasoning(context.tokens)
            reply = await client.step(text, len(completion.tokens), completion.finish_reason, is_reasoning=reasons)
            self._counts.update(tool_calls=reply.num_calls, tool_errors=reply.num_failed_calls)
            stream.rewards.append(weighted_sum([(self._settings.weight, reply.reward)]))
            is_last = turn + 1 == self._settings.max_turns
            # An episode that ends within a turn was cut off by tokens, whether or not it could have another turn.
            if reply.done or (is_last and completion.finish_reason == FinishReason.FINISH_REASON_LENGTH):
                reason = completion.finish_reason
                break
            if not reply.messages and self._dialog.has_ended(completion.tokens):
                detail = f"turn {turn} has ended, and the environment returned no message and is not done"
                raise EpisodeFailed(EnvironmentFailure.INVALID_REPLY, detail)
            if is_last:
                break
            added = self._dialog.reply(completion.tokens, reply.messages)
            if len(stream.tokens) + len(added) >= self._max_tokens:
                reason = FinishReason.FINISH_REASON_LENGTH
                self._counts["no_room"] += 1
                break
            stream.add_context(added)
            taken.append((completion.tokens, reply.messages))
        self._compare(prompt, messages, taken, sample)
        completion, episode = stream.end(reason, self.turn_seed(prompt, request, sample, 0), client.environment)
        experts, mask = bytes(stream.routed_experts), stream.joined_sampling_mask
        return Played(first, completion, episode, routed_experts=experts, sampling_mask=mask)

    def _begin(self, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
        try:
            return self._dialog.begin(prompt, messages)
        except OverlongPrompt as error:
            if not self._drops_overlong:
                raise
            raise EpisodeFailed(EnvironmentFailure.OVERLONG, error.message) from error

    def _compare(self, prompt: Prompt, messages: Sequence[Message], taken: Sequence[Taken], sample: int) -> None:
        """Renders one of the first episodes of several turns again, and warns if the chat template changes its text."""
        if not taken or not self._to_compare:
            return
        self._to_compare -= 1
        try:
            self._dialog.check_played(prompt, messages, taken)
        except InvalidInput as error:
            self._counts["rendered_differently"] += 1
            log.log(
                logging.INFO if self._differs else logging.WARNING,
                "prompt %s sample %d: a program that renders the conversation with the chat template will not show the "
                "model the text that it is trained on: %s",
                *(prompt.prompt_id, sample, error.message),
            )
            self._differs = True


def make_dialog(tokenizer: Tokenizer, environments: Environments, config: Config) -> Dialog:
    """Returns the dialog of the open environments.

    Raises:
        InvalidInput: The chat template changes earlier turns, or cannot render the environment's messages. A model
            without a chat template is not refused: its environment may send raw text only.
    """
    dialog = Dialog(tokenizer, environments.tools, config)
    dialog.check(environments.roles)
    return dialog


def make_collector(services: Services, tokenizer: Tokenizer, config: Config) -> Collector:
    """Returns the collector of episodes if the run has an environment, else that of single completions."""
    if services.environments is None:
        return Collector(services.rollout, services.reward, tokenizer, config.seed)
    if config.environment and config.environment.kind == "agent":
        return AgentCollector(services.rollout, services.reward, tokenizer, config, services.environments)
    return EpisodeCollector(services.rollout, services.reward, tokenizer, config, services.environments)


def _shared_prompt(played: Sequence[Played]) -> Prompt:
    prompts = [one.prompt for one in played if not one.failure] or [played[0].prompt]
    if any(prompt.tokens != prompts[0].tokens for prompt in prompts):
        raise InvalidInput(
            f"environment: reset gave prompt {prompts[0].prompt_id} other first messages with the same seed; all "
            "samples of a prompt must begin alike, since they are compared with one another",
            field="environment",
        )
    return prompts[0]
