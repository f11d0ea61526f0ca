"""Derives the seeds of a run."""

import hashlib


def seed_of(run_seed: int, *place: str | int) -> int:
    """Returns a seed below 2^63 that depends only on the run's seed and on `place`: step, prompt, sample, turn."""
    key = "/".join(map(str, (run_seed, *place))).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def environment_seed(run_seed: int, prompt_id: str) -> int:
    """Returns the seed of a prompt's episodes: the same in every step, so that all of them meet the same task."""
    return seed_of(run_seed, prompt_id, "environment")
