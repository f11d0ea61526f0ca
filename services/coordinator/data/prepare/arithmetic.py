"""Generates the quickstart's task: additions and subtractions of whole numbers up to 99, written as `47+85=`.

Answers are never negative and have no leading zeros. A checksum of its operands, independent of the seed and of their
order, assigns each problem to the train or the test split, so no train set has a problem of any test set.
"""

import random
import zlib
from functools import cache
from typing import Literal, TypedDict

from services.common.errors import InvalidInput

Split = Literal["train", "test"]

MAX_OPERAND = 99
_TEST_ONE_IN = 10


class Problem(TypedDict):
    """Holds one row. `level` is the number of carries, or of borrows for a subtraction: 0 to 2."""

    prompt: str
    answer: str
    level: int


def problems(split: Split, num: int, seed: int) -> list[Problem]:
    """Returns `num` distinct problems of `split` in random order; the same arguments give the same rows everywhere.

    The train split has 13,548 problems and the test split 1,502; two thirds are additions.

    Raises:
        InvalidInput: `split` is unknown or has fewer than `num` problems, or `num` is below one.
    """
    if split not in ("train", "test"):
        raise InvalidInput(f"split is {split!r}: give 'train' or 'test'", field="split")
    pool = _pool(split)
    if not 1 <= num <= len(pool):
        raise InvalidInput(
            f"num is {num}: it must be from 1 to {len(pool)}, the number of problems in the {split} split", field="num"
        )
    return [_problem(*key) for key in random.Random(f"{split}/{seed}").sample(pool, num)]


@cache
def _pool(split: Split) -> list[tuple[int, str, int]]:
    operands = range(MAX_OPERAND + 1)
    everything = [(a, op, b) for a in operands for op in "+-" for b in operands if op == "+" or a >= b]
    return [key for key in everything if _split_of(*key) == split]


def _split_of(a: int, op: str, b: int) -> Split:
    key = f"{min(a, b)}{op}{max(a, b)}"
    return "test" if zlib.crc32(key.encode()) % _TEST_ONE_IN == 0 else "train"


def _problem(a: int, op: str, b: int) -> Problem:
    answer = a + b if op == "+" else a - b
    # Every borrow of a - b is a carry of answer + b.
    level = _carries(a, b) if op == "+" else _carries(answer, b)
    return {"prompt": f"{a}{op}{b}=", "answer": str(answer), "level": level}


def _carries(a: int, b: int) -> int:
    """Counts the carries of `a + b`. Each carry reduces the digit sum by 9: ten less in one column, one more in the
    next.
    """
    return (_digit_sum(a) + _digit_sum(b) - _digit_sum(a + b)) // 9


def _digit_sum(number: int) -> int:
    return sum(map(int, str(number)))
