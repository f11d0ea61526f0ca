"""Scores the recorded samples of a step again, plays their turns to the environment again, and maps the recorded
requests of agents to tokens again. Compares all results with the record."""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import pyarrow as pa
from lockstep.reward.v1.reward_pb2 import Score
from lockstep.types.v1.types_pb2 import Completion, FinishReason, PolicyStamp

from services.common.batches import begins_of_samples
from services.common.config.environment import AgentEnvironmentConfig, BaseEnvironmentConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput, LockstepError, NotFound, PreconditionFailed, Reason
from services.common.json_values import JsonMapping, JsonObject
from services.common.rewards import total, weighted_sum
from services.common.tasks import gather
from services.coordinator.clients.environment import Environments
from services.coordinator.clients.reward import Rewards
from services.coordinator.data.calls import Left, requests_of
from services.coordinator.data.dialog import Dialog, message_of
from services.coordinator.data.groups import FINISH_REASONS, Episode, SampledGroup
from services.coordinator.data.order import environment_seed
from services.coordinator.data.prompts import Prompt, PromptDataset
from services.coordinator.data.reading.parquet import Record as Row
from services.coordinator.replay.record import Batch, Difference, compare
from services.coordinator.text.threads import Call, Renderer, Threads, close
from services.coordinator.text.tokenizer import Tokenizer

_FINISH_REASONS = {word: number for number, word in FINISH_REASONS.items()}


async def replay_rewards(
    batch: Batch, rewards: Rewards, data: PromptDataset, tokenizer: Tokenizer, episodes: Sequence[JsonMapping] = ()
) -> tuple[int, list[Difference]]:
    """Scores every group of `batch` with the opened `rewards`. Returns the number of samples and the differences.

    `episodes` has what agents left behind (data.calls.EPISODE_SCHEMA), by which they are scored.

    Raises:
        NotFound: There are episodes, but not those of a sample.
    """
    prompts, groups = prompts_of(batch, data), dict[int, list[Row]]()
    samples = batch.samples.take(pa.array(begins_of_samples(batch.samples)))
    left = {(episode["group"], episode["sample"]): Left.of(episode) for episode in episodes}
    for row in samples.to_pylist():
        groups.setdefault(row["group"], []).append(row)
        if left and (row["group"], row["sample"]) not in left:
            message = f"what the agent left behind in sample {row['sample']} of prompt {row['prompt_id']} is not there"
            raise NotFound(message, field="step")
    replayed = (
        _group(_sampled(prompts[rows[0]["prompt_id"]], rows, left, tokenizer), rows, rewards, tokenizer)
        for rows in groups.values()
    )
    return samples.num_rows, list(chain(*await gather(replayed)))


def prompts_of(batch: Batch, data: PromptDataset) -> dict[str, Prompt]:
    """Returns the prompts of the recorded samples by id.

    Raises:
        PreconditionFailed: The prompts are no longer those that were sampled.
        NotFound: The prompt of a sample is not in the data.
    """
    if batch.dataset_digest != data.digest:
        raise PreconditionFailed(
            f"data.train differs from what the run used (digest {data.digest}, recorded {batch.dataset_digest}): "
            "its rows, template or tokenizer were changed; restore them to replay its rewards"
        )
    wanted = set(batch.samples["prompt_id"].to_pylist())
    prompts = {prompt.prompt_id: prompt for prompt in data.prompts if prompt.prompt_id in wanted}
    if missing := wanted - prompts.keys():
        raise NotFound(f"prompts {', '.join(sorted(missing))} of the recorded samples are not in data.train")
    return prompts


def _sampled(
    prompt: Prompt, rows: Sequence[Row], left: Mapping[tuple[int, int], Left], tokenizer: Tokenizer
) -> SampledGroup:
    completions = [
        Completion(tokens=row["tokens"], finish_reason=_FINISH_REASONS[row["finish_reason"]], seed=row["seed"])
        for row in rows
    ]
    stamp = PolicyStamp(version=rows[0]["policy_version"], digest=rows[0]["policy_digest"])
    episodes = [episode for row in rows if (episode := Episode.of(row))]
    of_agents = [left[row["group"], row["sample"]] for row in rows] if left else []
    if not left:  # the prompts of an agent's calls are its own
        prompt = prompt.read_as(rows[0]["prompt_tokens"], tokenizer)
    return SampledGroup(rows[0]["group"], prompt, completions, stamp, episodes=episodes, left=of_agents)


async def _group(group: SampledGroup, rows: Sequence[Row], rewards: Rewards, tokenizer: Tokenizer) -> list[Difference]:
    prompt = group.prompt
    try:
        scored = await rewards.score(group, tokenizer)
    except LockstepError as error:
        if error.reason is not Reason.REWARD_FAILED:
            raise
        return [Difference(f"prompt {prompt.prompt_id}", "scored", error.message)]
    if scored is None:
        return [Difference(f"prompt {prompt.prompt_id}", "scored", "a sample cannot be scored; see the log")]
    pairs = zip(rows, scored.scores, strict=True)
    return [difference for row, score in pairs for difference in _sample(row, score, scored.scorer)]


def _sample(row: Row, score: Score, scorer: str) -> Iterator[Difference]:
    recorded = {"reward": row["reward"], "scorer": row["scorer"], **dict(row["components"])}
    is_agents = row.get("segment") is not None  # an agent gives no rewards, nor does a sample that was not scored
    episode = None if is_agents or score.HasField("failure") else Episode.of(row)
    of_episode = {"environment": episode.reward} if episode else {}
    reward = total([score.reward, *(episode.turn_rewards if episode else ())])
    components = {**dict.fromkeys(dict(row["components"])), **of_episode, **score.components}
    now = {"reward": reward, "scorer": scorer, **components}
    yield from compare(recorded, now, f"prompt {row['prompt_id']} sample {row['sample']}: ")


async def replay_environment(
    batch: Batch, environments: Environments, data: PromptDataset, dialog: Dialog, config: Config
) -> tuple[int, list[Difference]]:
    """Returns the number of turns that were played, and the differences in messages, rewards and ends."""
    rows, prompts = batch.samples.to_pylist(), prompts_of(batch, data)
    player = _Player(environments, dialog, config)
    played = await gather(player.play(row, prompts[row["prompt_id"]]) for row in rows)
    return sum(len(row["turn_begins"]) for row in rows), list(chain(*played))


class _Player:
    def __init__(self, environments: Environments, dialog: Dialog, config: Config):
        assert isinstance(config.environment, BaseEnvironmentConfig), "the run has an environment"
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
            if differences := [*_differing(f"{at} first prompt", row["prompt_tokens"], first.tokens)]:
                return differences
            for turn, tokens in enumerate(episode.turns(row["tokens"])):
                begin = episode.turn_begins[turn]
                text, reason = self._dialog.text(tokens), self._reason(tokens, begin)
                reasons = self._dialog.opens_reasoning([*first.tokens, *row["tokens"][:begin]])
                reply = await client.step(text, len(tokens), reason, is_reasoning=reasons)
                where, reward = f"{at} turn {turn} ", weighted_sum([(self._weight, reply.reward)])
                differences = [*compare({"reward": episode.turn_rewards[turn]}, {"reward": reward}, where)]
                if turn < len(replies) - 1:
                    differences += compare({"done": False}, {"done": reply.done}, where)
                    added = self._dialog.reply(tokens, reply.messages)
                    differences += _differing(f"{where}reply", replies[turn], added)
                if differences:
                    return differences
        return []

    def _reason(self, tokens: Sequence[int], begin: int) -> FinishReason:
        """Returns why a turn ended. A turn of the maximum length without a stop token was cut off."""
        most = min(self._config.rollout.sampling.max_tokens, self._config.max_response_tokens - begin)
        is_cut = len(tokens) == most and not self._dialog.is_stopped(tokens)
        return FinishReason.FINISH_REASON_LENGTH if is_cut else FinishReason.FINISH_REASON_STOP


_NUM_SHOWN = 8  # tokens from the first that differs


@dataclass(frozen=True)
class _Tokens:
    prompt: Sequence[int]
    answer: Sequence[int]


def replay_calls(
    samples: pa.Table, episodes: Sequence[JsonMapping], tokenizer: Tokenizer, config: Config
) -> tuple[int, list[Difference]]:
    """Returns the number of calls that were mapped, and the first difference of each episode."""
    rows: dict[tuple[int, int], list[JsonMapping]] = {}
    columns = ["group", "sample", "prompt_tokens", "tokens", "turn_begins", "turn_ends", "calls"]
    for row in samples.select(columns).to_pylist():
        rows.setdefault((row["group"], row["sample"]), []).append(row)
    mapper = _Mapper(tokenizer, config)
    every = [(episode, rows.get((episode["group"], episode["sample"]), [])) for episode in episodes]
    differences = list(chain(*(islice(mapper.differences(*pair), 1) for pair in every)))
    return sum(call["answer"] is not None for episode in episodes for call in episode["calls"]), differences


class _Mapper:
    def __init__(self, tokenizer: Tokenizer, config: Config):
        assert isinstance(config.environment, AgentEnvironmentConfig), "the run has an agent"
        self._settings = config.environment
        self._renderer = Renderer(tokenizer, config.data.chat_template_kwargs)
        self._dialog = Dialog(tokenizer, (), config)

    def differences(self, episode: JsonMapping, rows: Sequence[JsonMapping]) -> Iterator[Difference]:
        """Yields how the calls of an episode differ from its rows. All after the first may follow from it."""
        at, threads = f"prompt {episode['prompt_id']} sample {episode['sample']}", Threads(self._renderer)
        recorded, texts = _tokens_of(rows), [json.loads(text) for text in episode["texts"]]
        answered = [(call, said) for call, said in requests_of(episode) if call["answer"] is not None]
        to_close = deque(sorted(answered, key=lambda pair: pair[0]["answered"]))
        mapped: dict[int, Call] = {}
        for call, said in answered:
            while to_close[0][0]["answered"] < call["after"]:
                yield from self._close(at, mapped, to_close.popleft(), recorded, texts)
            where, number = f"{at} call {call['number']}", call["number"]
            if number not in recorded:
                yield Difference(f"{where}: rows", "none", "its tokens are trained in one")
                return
            try:
                mapped[number] = made = threads.add(number, said["messages"], said["tools"])
            except InvalidInput as error:
                yield Difference(f"{where}: prompt", _tokens_text(recorded[number].prompt, 0), error.message)
                return
            parent = made.parent and made.parent.number
            yield from compare({"parent": call["parent"]}, {"parent": parent}, f"{where}: ")
            yield from _differing(f"{where}: prompt", recorded[number].prompt, made.prompt)
        for earlier in to_close:
            yield from self._close(at, mapped, earlier, recorded, texts)
        segments = [[call["number"] for call in row["calls"]] for row in rows]
        now = [[call.number for call in path.calls] for path in threads.paths()]
        yield from compare({"segments": segments}, {"segments": now}, f"{at}: ")

    def _close(
        self,
        at: str,
        mapped: Mapping[int, Call],
        earlier: tuple[JsonMapping, JsonMapping],
        recorded: Mapping[int, _Tokens],
        texts: Sequence[JsonObject],
    ) -> Iterator[Difference]:
        """Gives a call its recorded tokens as the answer, and compares what they say."""
        (call, said), answer = earlier, texts[earlier[0]["answer"]]
        made, tokens = mapped[call["number"]], recorded[call["number"]].answer
        message, stop = message_of(self._settings, self._dialog, made, tokens, said)
        yield from compare({"answer": answer}, {"answer": message}, f"{at} call {call['number']}: ")
        close(made, tokens, answer, None, stop)


def _tokens_of(rows: Sequence[JsonMapping]) -> dict[int, _Tokens]:
    found: dict[int, _Tokens] = {}
    for row in rows:
        for call, begin, end in zip(row["calls"], row["turn_begins"], row["turn_ends"], strict=True):
            prompt = (*row["prompt_tokens"], *row["tokens"][:begin])
            found[call["number"]] = _Tokens(prompt, row["tokens"][begin:end])
    return found


def _differing(what: str, recorded: Sequence[int], now: Sequence[int]) -> Iterator[Difference]:
    if tuple(recorded) != tuple(now):
        pairs = enumerate(zip(recorded, now, strict=False))
        at = next((at for at, (one, other) in pairs if one != other), min(len(recorded), len(now)))
        yield Difference(f"{what} from token {at}", _tokens_text(recorded, at), _tokens_text(now, at))


def _tokens_text(tokens: Sequence[int], begin: int) -> str:
    part = tokens[begin : begin + _NUM_SHOWN]
    return f"{list(part)} of {len(tokens)} tokens"
