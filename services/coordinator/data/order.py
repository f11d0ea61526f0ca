"""Which prompts are in which batch: a pure function of (number of prompts, seed, step)."""

import numpy as np


def shuffled(number: int, seed: int, *key: int) -> np.ndarray:
    """0..number-1 in an order that follows from `seed` and `key`.

    It is the argsort of raw PCG64 output: numpy keeps the streams of bit generators and SeedSequence for ever (NEP 19),
    which it does not promise for `Generator.permutation`.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key))
    return np.argsort(bits.random_raw(number), kind="stable")


class EpochOrder:
    """An endless sequence of epochs cut into batches of equal size.

    Every epoch holds each of `num_prompts` once, in an order of its own if `shuffle`. A batch runs on from one epoch
    into the next where `prompts_per_step` does not divide `num_prompts`; it never holds a prompt twice, because two
    groups of one prompt would draw the same samples.
    """

    def __init__(self, num_prompts: int, prompts_per_step: int, *, seed: int, shuffle: bool):
        if not 1 <= prompts_per_step <= num_prompts:
            raise ValueError(f"prompts_per_step {prompts_per_step} must be in 1..{num_prompts}, the number of prompts")
        self.num_prompts = num_prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self._memo: dict[int, np.ndarray] = {}

    def indices(self, step: int) -> np.ndarray:
        """The [prompts_per_step] int64 indices of batch `step`, all different.

        Raises:
            ValueError: `step` is negative.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        epoch, first = divmod(step * self.prompts_per_step, self.num_prompts)
        batch = self._order(epoch)[first : first + self.prompts_per_step]
        missing = self.prompts_per_step - len(batch)
        return np.concatenate([batch, self._order(epoch + 1)[:missing]]) if missing else batch.copy()

    def _order(self, epoch: int) -> np.ndarray:
        """Order of `epoch`. It leans on the epoch before; the memo keeps the last two and changes no result."""
        if not self.shuffle:
            return np.arange(self.num_prompts)
        start = max((known for known in self._memo if known <= epoch), default=-1)
        for current in range(start + 1, epoch + 1):
            order = shuffled(self.num_prompts, self.seed, current)
            if current:
                self._part(self._memo[current - 1], order, current)
            self._memo = {known: kept for known, kept in self._memo.items() if known == current - 1} | {current: order}
        return self._memo[epoch]

    def _part(self, before: np.ndarray, order: np.ndarray, epoch: int) -> None:
        """Swaps out of the head of `order` what the batch that spans both epochs already took from `before`.

        There is always room: head and tail together are one batch, which is no longer than an epoch.
        """
        num_tail = epoch * self.num_prompts % self.prompts_per_step
        if num_tail == 0:
            return
        num_head = self.prompts_per_step - num_tail
        taken = np.isin(order, before[-num_tail:])
        clash = np.flatnonzero(taken[:num_head])
        free = num_head + np.flatnonzero(~taken[num_head:])[: len(clash)]
        order[clash], order[free] = order[free], order[clash]
