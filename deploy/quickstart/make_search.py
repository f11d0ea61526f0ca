"""Makes the corpus, the questions and the starting model of deploy/runs/search.yaml: a Qwen3 that searches badly.

Documents and questions are of a made-up world (small_world.py), in the files in which NQ and Wikipedia are published
for Search-R1 (arXiv 2503.09516); `lockstep data search-r1` converts them. The model starts from random weights and
imitates flawed demonstrations, which often guess, search for the wrong word or answer too early. Their questions are
about other worlds with the same names, so that the model learns how to search, and no answers.

    python -m deploy.quickstart.make_search

It writes data/search and runs `lockstep sft deploy/quickstart/search_sft.yaml`; arguments are overrides of that run.
Needs the `trainer` and `reward` extras.
"""

import asyncio
import json
import logging
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AddedToken

from deploy.quickstart.make_model import LOCKSTEP, SEED, make_start
from deploy.quickstart.small_world import CITIES, COUNTRIES, PEOPLE, WORKS, Question, World
from deploy.quickstart.words import make_tokenizer
from services.common.config.environment import SearchToolConfig
from services.common.config.load import load
from services.common.config.sft import SftConfig
from services.coordinator.data.prepare import SEARCH_INSTRUCTION
from services.reward.environments.search import Search

SFT = Path(__file__).with_name("search_sft.yaml")
OUT = Path("data/search")

PATTERN = r"</?[a-z]+>| ?[A-Za-z]+| ?[0-9]+|\n\n| ?[^\w\s]|[\s\S]"
"""A word is a token, together with the space before it."""
MAX_TOKENS = 512

NUM_HELD_OUT = 100
NUM_WORLDS = 30
"""Number of worlds of the demonstrations; all questions of each are asked once."""
GUESSES, WRONG_WORD, MISREADS, TOO_EARLY = 0.25, 0.2, 0.1, 0.3
"""Shares of the mistakes in the demonstrations; the last is that among questions that need two documents and have no
other mistake."""
WRONG_WORDS = ("city", "work", "lives", "country")
CHOICES: Mapping[str, Sequence[str]] = {"city": CITIES, "country": COUNTRIES}


def write_questions() -> None:
    """Writes the world's documents and questions as they are published, and converts them."""
    world, rng = World(SEED), random.Random(SEED)
    rows = [{"question": question.text, "answer": [question.answer]} for question in world.questions()]
    rng.shuffle(rows)
    contents = [{"contents": f'"{document["title"]}"\n{document["text"]}'} for document in world.documents()]
    files = {"nq-train": rows[NUM_HELD_OUT:], "nq-test": rows[:NUM_HELD_OUT], "wiki": contents}
    for name, lines in files.items():
        (OUT / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    train, test, corpus = (str(OUT / f"{name}.jsonl") for name in files)
    options = ["--questions", train, "--test-questions", test, "--corpus", corpus, "--out", str(OUT)]
    subprocess.run([LOCKSTEP, "data", "search-r1", *options], check=True)


def demonstration(question: Question, found: Mapping[str, str], rng: random.Random) -> str:
    """Returns the text of a demonstration: searches with the documents that are `found` for each word, and an
    answer."""
    choices = CHOICES[question.kind]
    guess, chance = _answer(rng.choice(choices)), rng.random()
    if chance < GUESSES:
        return guess
    chance -= GUESSES
    if chance < WRONG_WORD:
        return _search(rng.choice(WRONG_WORDS), found) + guess
    searches = [_search(name, found) for name in question.names]
    chance -= WRONG_WORD
    if chance < MISREADS:
        return "".join(searches) + guess
    if len(searches) > 1 and rng.random() < TOO_EARLY:
        return searches[0] + guess
    return "".join(searches) + _answer(question.answer)


async def write_demonstrations() -> list[str]:
    """Writes the questions and answers of the demonstrations, and returns their texts."""
    rng, rows = random.Random(SEED), []
    for seed in range(1, NUM_WORLDS + 1):
        world = World(SEED + seed)
        found = await _search_for(world, [*PEOPLE, *CITIES, *WRONG_WORDS])
        for question in world.questions():
            prompt = f"{SEARCH_INSTRUCTION}\n\nQuestion: {question.text}"
            rows.append({"prompt": prompt, "response": demonstration(question, found, rng)})
    pq.write_table(pa.Table.from_pylist(rows), OUT / "demonstrations.parquet")
    return [text for row in rows for text in row.values()]


def write_start(folder: str, texts: list[str]) -> None:
    """Writes the model with random weights, and a tokenizer for the words of `texts`. The instruction is one token."""
    words = {f" {name}" for name in (*PEOPLE, *CITIES, *COUNTRIES, *WORKS)}
    words |= {word for text in texts for word in re.findall(PATTERN, text.replace(SEARCH_INSTRUCTION, ""))}
    tokenizer = make_tokenizer(sorted(words), PATTERN, MAX_TOKENS)
    tokenizer.add_tokens([AddedToken(SEARCH_INSTRUCTION, normalized=False)])
    make_start(128, 2, len(tokenizer), MAX_TOKENS).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Writes all files and trains the model."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run = [str(SFT), *sys.argv[1:]]
    OUT.mkdir(parents=True, exist_ok=True)
    write_questions()
    write_start(load(SftConfig, run).model, asyncio.run(write_demonstrations()))
    subprocess.run([LOCKSTEP, "sft", *run], check=True)


async def _search_for(world: World, words: list[str]) -> dict[str, str]:
    """Returns the results of the run's own search tool in the world's documents for each word."""
    corpus = OUT / "demonstration-corpus.parquet"
    pq.write_table(pa.Table.from_pylist(world.documents()), corpus)
    tool = Search(SearchToolConfig(corpus=str(corpus)))
    await tool.open()
    return {word: await tool.call({"query": word}, 60.0) for word in words}


def _search(word: str, found: Mapping[str, str]) -> str:
    return f"<search> {word}</search>\n\n<information>{found[word]}</information>\n\n"


def _answer(text: str) -> str:
    return f"<answer> {text}</answer>"


if __name__ == "__main__":
    main()
