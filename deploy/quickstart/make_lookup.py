"""Makes the model and the prompts of deploy/runs/lookup.yaml: a Qwen3 that knows a lookup tool and uses it badly.

A prompt is a key of three digits. Its value is in a table that only the tool has (lookup.py). The model starts from
random weights and imitates flawed demonstrations. They guess the value, look up another key, misread the result, or
leave the call open, and are right about three times in ten. Their values are random, so that the model learns how to
call the tool, and nothing of the table.

    python -m deploy.quickstart.make_lookup

It writes data/lookup and runs `lockstep sft deploy/quickstart/lookup_sft.yaml`; arguments are overrides of that run.
Needs the `trainer` extra.
"""

import logging
import random
import string
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from deploy.quickstart.lookup import TABLE
from deploy.quickstart.make_model import LOCKSTEP, SEED, make_start
from deploy.quickstart.words import make_tokenizer
from services.common.config.load import load
from services.common.config.sft import SftConfig

SFT = Path(__file__).with_name("lookup_sft.yaml")
OUT = Path("data/lookup")

ROLES = ["<user>", "<assistant>", "<tool>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_TOKENS = 128

NUM_CONVERSATIONS, NUM_HELD_OUT = 24_000, 200
RIGHT, GUESSES, WRONG_KEY, MISREADS = 0.3, 0.25, 0.2, 0.15
"""Shares of the demonstrations; in the rest, the call is left open."""

Message = dict[str, str]


def conversation(rng: random.Random, key: str) -> list[Message]:
    """Returns the text of a demonstration, and the answer of a tool that has a random value."""
    value, chance = _number(rng, 2), rng.random()
    guess = [_message("assistant", _number(rng, 2))]
    if chance < GUESSES:
        return [_message("user", key), *guess]
    chance -= GUESSES
    if chance < WRONG_KEY:
        return [_message("user", key), *_call(f"{_slip(rng, key)}</lookup>", value), _message("assistant", value)]
    chance -= WRONG_KEY
    if chance < MISREADS:
        return [_message("user", key), *_call(f"{key}</lookup>", value), _message("assistant", _slip(rng, value))]
    chance -= MISREADS
    if chance < RIGHT:
        return [_message("user", key), *_call(f"{key}</lookup>", value), _message("assistant", value)]
    return [_message("user", key), *_call(key, "error: the call has no </lookup>"), *guess]


def write_files() -> None:
    """Writes the demonstrations, and the prompts of the run: all keys, some of them held out for evaluation."""
    rng = random.Random(SEED)
    keys = rng.sample(sorted(TABLE), len(TABLE))
    rows = [{"messages": conversation(rng, _number(rng, 3))} for _ in range(NUM_CONVERSATIONS)]
    prompts = [{"prompt": key, "answer": TABLE[key]} for key in keys]
    OUT.mkdir(parents=True, exist_ok=True)
    _write("conversations", rows)
    _write("train", prompts[NUM_HELD_OUT:])
    _write("test", prompts[:NUM_HELD_OUT])


def write_start(folder: str) -> None:
    """Writes the model with random weights and its tokenizer, which has a token for each character and tag."""
    words = [*ROLES, "<lookup>", "</lookup>", *string.printable]
    tokenizer = make_tokenizer(words, r"</?[a-z]+>|[\s\S]", MAX_TOKENS)
    tokenizer.add_special_tokens({"additional_special_tokens": ROLES})
    tokenizer.chat_template = TEMPLATE
    make_start(64, 2, len(tokenizer), MAX_TOKENS).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Writes all files and trains the model."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run = [str(SFT), *sys.argv[1:]]
    write_start(load(SftConfig, run).model)
    write_files()
    subprocess.run([LOCKSTEP, "sft", *run], check=True)


def _call(text: str, result: str) -> list[Message]:
    return [_message("assistant", f"<lookup>{text}"), _message("tool", result)]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _number(rng: random.Random, num_digits: int) -> str:
    return "".join(rng.choices(string.digits, k=num_digits))


def _slip(rng: random.Random, number: str) -> str:
    """Returns the number with another digit in one place."""
    place = rng.randrange(len(number))
    digit = (int(number[place]) + rng.randrange(1, 10)) % 10
    return f"{number[:place]}{digit}{number[place + 1 :]}"


def _write(name: str, rows: Sequence[Mapping[str, object]]) -> None:
    pq.write_table(pa.Table.from_pylist(list(map(dict, rows))), OUT / f"{name}.parquet")


if __name__ == "__main__":
    main()
