"""Maps the recorded requests of agents to tokens again, and compares them with the recorded rows."""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import pyarrow as pa

from services.common.config.environment import AgentEnvironmentConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.common.json_values import JsonMapping, JsonObject
from services.coordinator.data.calls import requests_of
from services.coordinator.data.dialog import Dialog
from services.coordinator.replay.record import Difference, compare
from services.coordinator.rl.sampling.agents import message_of
from services.coordinator.text.threads import Call, Renderer, Threads, close
from services.coordinator.text.tokenizer import Tokenizer

_NUM_SHOWN = 8  # tokens from the first that differs


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a call, as a row has them."""

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
                yield Difference(f"{where}: prompt", _shown(recorded[number].prompt, 0), error.message)
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
    """Returns the tokens of each call by its number."""
    found: dict[int, _Tokens] = {}
    for row in rows:
        for call, begin, end in zip(row["calls"], row["turn_begins"], row["turn_ends"], strict=True):
            prompt = (*row["prompt_tokens"], *row["tokens"][:begin])
            found[call["number"]] = _Tokens(prompt, row["tokens"][begin:end])
    return found


def _differing(what: str, recorded: Sequence[int], now: Sequence[int]) -> Iterator[Difference]:
    """Yields the first token that differs."""
    if tuple(recorded) != tuple(now):
        pairs = enumerate(zip(recorded, now, strict=False))
        at = next((at for at, (one, other) in pairs if one != other), min(len(recorded), len(now)))
        yield Difference(f"{what} from token {at}", _shown(recorded, at), _shown(now, at))


def _shown(tokens: Sequence[int], begin: int) -> str:
    part = tokens[begin : begin + _NUM_SHOWN]
    return f"{list(part)} of {len(tokens)} tokens"
