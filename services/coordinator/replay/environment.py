"""Plays the recorded turns of a step to the environment again, and compares its replies byte for byte."""

from collections.abc import Sequence

from lockstep.types.v1.types_pb2 import FinishReason

from services.common.config.run import Config
from services.common.rewards import weighted_sum
from services.common.tasks import gather
from services.coordinator.data.dialog import Dialog
from services.coordinator.data.episodes import Episode
from services.coordinator.data.prompts import Prompt, PromptDataset
from services.coordinator.data.reading.parquet import Record as Row
from services.coordinator.data.seeds import environment_seed
from services.coordinator.replay.record import Batch, Difference
from services.coordinator.replay.rewards import prompts_of
from services.coordinator.services.clients.environment import Environments


async def replay_environment(
    batch: Batch, environments: Environments, data: PromptDataset, dialog: Dialog, config: Config
) -> tuple[int, list[Difference]]:
    """Returns the number of turns that were played, and the differences in messages, rewards and ends.

    Raises:
        PreconditionFailed: The prompts are no longer those that were sampled.
        NotFound: The prompt of a sample is not in the data.
        EpisodeFailed: The environment failed.
    """
    rows, prompts = batch.samples.to_pylist(), prompts_of(batch, data)
    player = _Player(environments, dialog, config)
    found = await gather(player.play(row, prompts[row["prompt_id"]]) for row in rows)
    return sum(len(row["turn_begins"]) for row in rows), [one for differences in found for one in differences]


class _Player:
    def __init__(self, environments: Environments, dialog: Dialog, config: Config):
        assert config.environment, "the run has an environment"
        self._environments, self._dialog, self._config = environments, dialog, config
        self._weight = config.environment.weight

    async def play(self, row: Row, prompt: Prompt) -> list[Difference]:
        """Plays one recorded sample. Stops at the first reply that differs, because later turns depend on it."""
        at, episode = f"prompt {row['prompt_id']} sample {row['sample']}", Episode.of(row)
        assert episode is not None, "every sample of the run has an episode"
        replies = episode.replies(row["tokens"])
        async with self._environments.episode(f"replay/{row['group']}/{row['sample']}") as client:
            seed = environment_seed(self._config.seed, prompt.prompt_id)
            first = self._dialog.begin(prompt, await client.reset(seed, prompt))
            if found := _differences(f"{at} first prompt", row["prompt_tokens"], first.tokens):
                return found
            for turn, tokens in enumerate(episode.turns(row["tokens"])):
                begin = episode.turn_begins[turn]
                text, reason = self._dialog.text(tokens), self._reason(tokens, begin)
                reasons = self._dialog.opens_reasoning([*first.tokens, *row["tokens"][:begin]])
                reply = await client.step(text, len(tokens), reason, is_reasoning=reasons)
                reward = weighted_sum([(self._weight, reply.reward)])
                found = _differences(f"{at} turn {turn} reward", episode.turn_rewards[turn], reward)
                if turn < len(replies) - 1:
                    found += _differences(f"{at} turn {turn} done", False, reply.done)
                    now = self._dialog.reply(tokens, reply.messages)
                    found += _differences(f"{at} turn {turn} reply", replies[turn], now)
                if found:
                    return found
        return []

    def _reason(self, tokens: Sequence[int], begin: int) -> FinishReason:
        """Returns why a turn ended. A turn of the maximum length without a stop token was cut off."""
        most = min(self._config.rollout.sampling.max_tokens, self._config.max_response_tokens - begin)
        is_cut = len(tokens) == most and not self._dialog.is_stopped(tokens)
        return FinishReason.FINISH_REASON_LENGTH if is_cut else FinishReason.FINISH_REASON_STOP


def _differences(what: str, recorded: object, now: object) -> list[Difference]:
    if isinstance(recorded, Sequence):
        recorded, now = list(recorded), list(now)  # type: ignore[call-overload]
    return [] if recorded == now else [Difference(what, str(recorded), str(now))]
