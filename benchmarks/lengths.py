"""Draws the completion lengths that `benchmarks.train` trains on; `python -m benchmarks.lengths` writes lengths.json.

SkyRL publishes only the mean length of its workload. Here lengths are log-normal, clipped so that no sequence is longer
than 4,096 tokens. Each block of 320 lengths, the share of one GPU of eight, is a stratified sample. Any number of
blocks therefore has the same distribution, and runs on fewer GPUs, with fewer blocks, are comparable.
"""

import json
import math
import random
from pathlib import Path
from statistics import NormalDist

BLOCK, NUM_BLOCKS = 320, 8
PROMPT_TOKENS, MAX_TOKENS = 175, 4096
MEANS = (658, 819, 1158)

_FILE = Path(__file__).with_suffix(".json")
_SIGMA = 0.6


def read_lengths(mean: int, num_samples: int) -> list[int]:
    """Returns the lengths in tokens of the first completions of the fixture with this mean."""
    return json.loads(_FILE.read_text())[str(mean)][:num_samples]


def make_lengths(mean: int, seed: int = 0) -> list[int]:
    """Returns the lengths in tokens of `NUM_BLOCKS` blocks of completions; `mean` is their mean after clipping."""
    draw, normal = random.Random(seed), NormalDist()
    scores: list[float] = []
    for _ in range(NUM_BLOCKS):
        block = [normal.inv_cdf((index + draw.random()) / BLOCK) for index in range(BLOCK)]
        draw.shuffle(block)
        scores += block
    low, high = 1.0, float(MAX_TOKENS)
    lengths: list[int] = []
    for _ in range(50):  # find the median by bisection
        median = (low + high) / 2
        lengths = [_length(median, score) for score in scores]
        low, high = (median, high) if sum(lengths) < mean * len(lengths) else (low, median)
    return lengths


def _length(median: float, score: float) -> int:
    return min(round(median * math.exp(_SIGMA * score)), MAX_TOKENS - PROMPT_TOKENS)


if __name__ == "__main__":
    lines = [f'"{mean}": {json.dumps(make_lengths(mean))}' for mean in MEANS]
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
