"""Assigns prompts to batches, and seeds to samples: pure functions of (number of prompts, seed, step)."""

import hashlib
import math

import numpy as np


def shuffled(number: int, seed: int, *key: int) -> np.ndarray:
    """Returns 0..number-1 in an order that depends only on `seed` and `key`.

    It is the argsort of raw PCG64 output, because numpy guarantees the streams of bit generators and SeedSequence
    forever (NEP 19), but not those of `Generator.permutation`.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key))
    return np.argsort(bits.random_raw(number), kind="stable")


class EpochOrder:
    """Defines an endless sequence of epochs, divided into batches of equal size.

    Every epoch has each of `num_prompts` prompts once, in an order of its own if `shuffle`. If `prompts_per_step` does
    not divide `num_prompts`, some batches span two epochs. No batch has a prompt twice, because two groups of the same
    prompt would get the same seeds and so the same samples.
    """

    def __init__(self, num_prompts: int, prompts_per_step: int, *, seed: int, shuffle: bool):
        if not 1 <= prompts_per_step <= num_prompts:
            raise ValueError(f"prompts_per_step {prompts_per_step} must be in 1..{num_prompts}, the number of prompts")
        self.num_prompts = num_prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        # An epoch that begins with a batch does not depend on the one before it; this is every how many-th.
        self._period = prompts_per_step // math.gcd(prompts_per_step, num_prompts)
        self._cache: dict[int, np.ndarray] = {}

    def indices(self, step: int) -> np.ndarray:
        """Returns the int64 indices [prompts_per_step] of batch `step`, all distinct.

        Raises:
            ValueError: `step` is negative.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        epoch, first = divmod(step * self.prompts_per_step, self.num_prompts)
        batch = self._order(epoch)[first : first + self.prompts_per_step]
        missing = self.prompts_per_step - len(batch)
        return np.concatenate([batch, self._order(epoch + 1)[:missing]]) if missing else batch

    def _order(self, epoch: int) -> np.ndarray:
        """Returns the order of `epoch`, which may depend on the previous epoch. Caches the last two orders."""
        if not self.shuffle:
            return np.arange(self.num_prompts)
        free = epoch - epoch % self._period
        known = max((known for known in self._cache if known <= epoch), default=-1)
        for current in range(max(known + 1, free), epoch + 1):
            order = shuffled(self.num_prompts, self.seed, current)
            if current % self._period:
                self._avoid_repeats(self._cache[current - 1], order, current)
            previous = {known: old for known, old in self._cache.items() if known == current - 1}
            self._cache = previous | {current: order}
        return self._cache[epoch]

    def _avoid_repeats(self, before: np.ndarray, order: np.ndarray, epoch: int) -> None:
        """Swaps prompts in the head of `order` that the batch spanning both epochs already took from `before`.

        There are always enough others: head and tail together are one batch, which is no longer than an epoch.
        """
        num_tail = epoch * self.num_prompts % self.prompts_per_step
        num_head = self.prompts_per_step - num_tail
        taken = np.isin(order, before[-num_tail:])
        clash = np.flatnonzero(taken[:num_head])
        free = num_head + np.flatnonzero(~taken[num_head:])[: len(clash)]
        order[clash], order[free] = order[free], order[clash]


def seed_of(run_seed: int, *place: str | int) -> int:
    """Returns a seed below 2^63 that depends only on the run's seed and on `place`: step, prompt, sample, turn."""
    key = "/".join(map(str, (run_seed, *place))).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def environment_seed(run_seed: int, prompt_id: str) -> int:
    """Returns the seed of a prompt's episodes: the same in every step, so that all of them meet the same task."""
    return seed_of(run_seed, prompt_id, "environment")
