"""Tests that the tokens of agents are exact: random episodes, and a model that writes what tokenizers and JSON dislike.

Each claim is tried with a mutant of the product too, and must fail there.
"""

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from services.coordinator.text import threads
from services.coordinator.text.threads import Call, Path, Renderer, Threads
from tests.agents.in_process import (
    TOKENIZER,
    Ask,
    Engine,
    Json,
    Speaker,
    Tokens,
    caught,
    edited,
    everything_is_trained_once,
    play,
    user,
)

(END,) = TOKENIZER.encode("<|im_end|>")
DIALECTS = ("chat", "messages", "responses")


def _no_paths_of_forks(self: Threads, calls: list[Any], num_repeated: int) -> Iterator[Path]:
    followers = [call for call in self.calls if call.is_answered and call.parent is calls[-1]]
    yield from self._paths_from([*calls, followers[0]], 0) if followers else [Path(calls, 0)]


def _forks_train_all(self: Threads, calls: list[Any], num_repeated: int) -> Iterator[Path]:
    followers = [call for call in self.calls if call.is_answered and call.parent is calls[-1]]
    for follower in followers:
        yield from self._paths_from([*calls, follower], 0)
    if not followers:
        yield Path(calls, 0)


def _rendered_again(self: Call) -> Tokens:
    return (*self.prompt, *TOKENIZER.encode(TOKENIZER.decode(self.answer, skip_special_tokens=False)))


MUTANTS: dict[str, tuple[object, str, object]] = {
    "the content is not checked": (threads, "_same_message", lambda one, other: one["role"] == other["role"]),
    "a fork is masked": (Threads, "_paths_from", _no_paths_of_forks),
    "a fork trains its prefix again": (Threads, "_paths_from", _forks_train_all),
    "sampled tokens are rendered again": (Call, "tokens", property(_rendered_again)),
    "each call is a segment": (Renderer, "extend", lambda *_: None),
}


class RandomAgent:
    """Goes on with any of its conversations, several at a time; edits answers, compacts, and starts sub-agents."""

    def __init__(self, chance: random.Random, engine: Engine):
        self._chance, self._engine = chance, engine
        self._grown: dict[str, set[tuple[Tokens, Tokens]]] = {}

    async def __call__(self, speaker: Speaker, ask: Ask) -> None:
        chance, self._speaker, self._ask = self._chance, speaker, ask
        histories: list[tuple[list[Json], str, int | None, bool]] = [([user("start")], "", None, False)]
        for _ in range(chance.randrange(1, 5)):
            picked = chance.choices(histories[-6:], k=chance.choice((1, 1, 2, 3)))
            histories += await asyncio.gather(*(self._step(*one) for one in picked))

    async def _step(
        self, history: list[Json], system: str, parent: int | None, is_edited: bool
    ) -> tuple[list[Json], str, int | None, bool]:
        """Asks, checks what the engine got, and returns a conversation that may follow."""
        chance, speaker, log = self._chance, self._speaker, self._engine.log
        known = self._grown.get(json.dumps([history[:-1], system]), set())
        number, answer = await self._ask(history, system)
        if parent is not None and len(known) == 1:  # two answers that look alike are not guessed between
            before = [token for part in log[parent] for token in part]
            assert (list(log[number][0][: len(before)]) == before) is not is_edited
        echo = json.loads(json.dumps(speaker.echo(answer)))
        self._grown.setdefault(json.dumps([[*history, *echo], system]), set()).add(log[number])
        kind = chance.random()
        if kind < 0.1:
            return [user(f"so far: {chance.random()}")], system, None, False
        if kind < 0.2:
            return [user(f"help {chance.random()}")], f"You are {chance.random()}.", None, False
        is_edited = kind < 0.3
        results = [speaker.result(name, f"r{chance.randrange(99)}") for name in speaker.call_ids(answer)]
        said = results if len(results) == 1 else [user(f"and {chance.randrange(99)}")]
        return [*history, *(edited(echo) if is_edited else echo), *said], system, number, is_edited


def random_tokens(chance: random.Random) -> list[int]:
    """Returns text in odd pieces, a call of a tool with odd JSON, or any tokens at all."""
    kind = chance.random()
    if kind < 0.3:
        tokens = [chance.randrange(TOKENIZER._backend.get_vocab_size()) for _ in range(chance.randrange(1, 9))]
    else:
        arguments = chance.choice(('{"b": 5000.0, "a": "x"}', '{ "a":"\\u0041", "b":1e2}', "{}"))
        call = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        rest = call if kind < 0.6 else chance.choice(("Zoë", "<think>a</think>b", ""))
        text = f"t{chance.randrange(10**6)} {rest}"
        cuts = sorted({0, len(text), *(chance.randrange(len(text)) for _ in range(4))})
        tokens = [token for begin, end in itertools.pairwise(cuts) for token in TOKENIZER.encode(text[begin:end])]
    tokens = [token for token in tokens if token not in TOKENIZER.eos_token_ids]
    return [*tokens, END] if chance.random() < 0.9 or not tokens else tokens


async def check_random_episodes(seeds: range) -> None:
    num_calls = num_rows = 0
    for seed in seeds:
        chance = random.Random(seed)
        engine = Engine(lambda chance=chance: random_tokens(chance), chance)
        rows = await play(RandomAgent(chance, engine), engine, DIALECTS[seed % 3])
        everything_is_trained_once(engine, rows)
        num_calls, num_rows = num_calls + len(engine.log), num_rows + len(rows)
    assert num_calls > 2 * len(seeds) and num_rows > 1.5 * len(seeds), "the episodes have forks and segments"


@pytest.mark.parametrize("mutant", ["", *MUTANTS])
async def test_random_episodes_are_exact(mutant: str, monkeypatch: pytest.MonkeyPatch):
    if mutant:
        monkeypatch.setattr(*MUTANTS[mutant])
    with caught(mutant):
        await check_random_episodes(range(60 if mutant else 120))


@pytest.mark.long
async def test_more_random_episodes_are_exact():
    await check_random_episodes(range(120, 1000))


# What a model writes that tokenizers, JSON and clients change when they write it again: text, or tokens of it.
def call_with(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


ADVERSARY: dict[str, list[int] | str] = {
    "another split": [token for letter in "Paris " for token in TOKENIZER.encode(letter)],
    "a split within a character": [TOKENIZER.encode("é")[0], *TOKENIZER.encode(" then more")],
    "invalid UTF-8": [*TOKENIZER.encode("ab"), TOKENIZER.encode("漢")[0], *TOKENIZER.encode(" cd")],
    "special tokens": [*TOKENIZER.encode("so"), *TOKENIZER.encode("<|im_start|>"), *TOKENIZER.encode("user\nhi")],
    "the text of special tokens": [token for letter in "x<|im_end|>\n" for token in TOKENIZER.encode(letter)],
    "white space": "  \n\n Paris \t\n ",
    "nothing": "",
    "reasoning": "<think>\n easy \n</think>\n\n Paris",
    "reasoning without an end": "<think> easy",
    "a whole float": call_with('{"b": 5000.0, "a": 1e3}'),
    "an order of keys": call_with('{"b": 1, "a": {"d": 2, "c": 3}}'),
    "a key twice": call_with('{"a": 1, "a": 2}'),
    "no arguments": call_with("{}"),
    "arguments of white space": call_with("{ \n }"),
    "escapes": call_with('{"a": "\\u0041\\/\\u00e9 \\ud83c\\udf89"}'),
    "half of a surrogate pair": call_with('{"a": "\\ud800", "\\udc00": 1}'),
    "a number that JavaScript rounds": call_with('{"a": 12345678901234567890, "b": 0.1}'),
    "a number that is none": call_with('{"a": NaN, "b": 1e999}'),
    "two calls with text": f"One.\n{call_with('{}')}\n{call_with(json.dumps({'a': 'x'}))}",
    "a call and a broken one": f"{call_with('{}')}\n{call_with('{')}",
    "a call within a call": call_with(json.dumps({"a": call_with("{}")})),
}


def as_another_library(value: Any) -> Any:
    """Returns JSON as JavaScript writes it, numbers as doubles and whole ones without a fraction; keys reversed."""
    if isinstance(value, dict):
        return {key: as_another_library(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return list(map(as_another_library, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) < 2**53 else number
    return value


async def check_adversary(dialect: str) -> None:
    """Plays three turns for each of what the model writes; the agent changes nothing."""
    for name, said in ADVERSARY.items():
        tokens = TOKENIZER.encode(said) if isinstance(said, str) else said
        engine = Engine(lambda tokens=tokens: [*tokens, END], random.Random(0))

        async def agent(speaker: Speaker, ask: Ask) -> None:
            history = [user("begin")]
            for index in range(3):
                _, answer = await ask(history)
                results = [speaker.result(call, f"result {index}") for call in speaker.call_ids(answer)]
                history += [*as_another_library(speaker.echo(answer)), *(results or [user(f"and {index}?")])]

        rows = await play(agent, engine, dialect)
        assert [len(row["turn_begins"]) for row in rows] == [3], f"{name}: an answer that is sent back was not known"
        everything_is_trained_once(engine, rows)


ADVERSARY_MUTANTS = {
    "arguments are compared as text": (threads, "_value", str),
    "sampled tokens are rendered again": MUTANTS["sampled tokens are rendered again"],
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("mutant", ["", *ADVERSARY_MUTANTS])
async def test_whatever_a_model_writes_is_one_segment(mutant: str, dialect: str, monkeypatch: pytest.MonkeyPatch):
    if mutant == "arguments are compared as text" and dialect != "messages":
        return  # these clients send the text back
    if mutant:
        monkeypatch.setattr(*ADVERSARY_MUTANTS[mutant])
    with caught(mutant):
        await check_adversary(dialect)
