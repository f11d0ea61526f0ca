"""Updates the policy on a batch that arrives in blocks. Every rank runs the same code."""

import functools
from collections.abc import Sequence

import torch

from services.common.config.trainer import TrainerConfig
from services.trainer.backend import AddsBlocks, Backend
from services.trainer.losses import Totals
from services.trainer.updates.gap import Gaps, Replayed, require_agreement
from services.trainer.updates.packing import Pack
from services.trainer.updates.policy import apply_gradient, later_update, means_of, pack_loss, set_old

# Metrics that are divided by the same count as the loss; the others are means over tokens.
_LOSSES = ("loss", "policy_loss")


class BlockUpdate:
    """Updates the policy on one batch: once for each of its mini-batches, which consist of whole blocks.

    Blocks of the first mini-batch add to the gradient as they arrive. Those of later ones are kept, because they are
    trained on by the weights that the updates before them leave. `apply` makes all updates, and computes each later
    mini-batch at once.

    The counts that the loss is divided by are known only at the end. So each block adds the gradient of the sum of its
    losses, and `apply` divides once, in float32. Discards gradients that an earlier update has left.
    """

    def __init__(self, backend: Backend, config: TrainerConfig, temperature: float):
        assert isinstance(backend, AddsBlocks), "TrainerConfig.adds_blocks, which the servicer requires"
        self._backend, self._blocks = backend, backend
        self._config, self._temperature = config, temperature
        self._sums: dict[str, float] = {}
        self._kept: dict[int, list[Pack]] = {}  # number of a later mini-batch -> this rank's packs
        self._gaps, self._replayed = Gaps(), Replayed()
        backend.discard_gradients()

    def add(self, packs: Sequence[Pack], minibatch: int) -> None:
        """Takes this rank's packs of a block of mini-batch number `minibatch`, counted from 0."""
        if not minibatch:
            self._gaps.add(packs, self._accumulate(packs))
            return
        self._kept.setdefault(minibatch, []).extend(packs)
        if self._config.loss.old_logprobs == "recompute":  # the old policy is the one before the first update
            outputs = self._backend.forward(packs, self._temperature)
            set_old(packs, outputs)
            self._gaps.add(packs, outputs)

    def apply(self, totals: Sequence[Totals], version: int) -> dict[str, float]:
        """Updates the policy, which is at `version`, on the mini-batches, which have `totals`.

        Returns metrics, the same on every rank: means over the updates.

        Raises:
            PreconditionFailed: The engine's and the trainer's log-probabilities differ too much. Nothing is applied.
                Or the gradient of the first update is not finite and `optim.on_nonfinite` is fail.
            RuntimeError: A later update failed, so that a part of the batch is applied.
        """
        compared = totals if self._config.loss.old_logprobs == "recompute" else totals[:1]
        num_tokens = sum(minibatch.num_tokens for minibatch in compared)
        gap = require_agreement(self._backend, self._gaps, num_tokens, self._config)
        metrics: list[dict[str, float]] = []
        for index, minibatch in enumerate(totals):
            with later_update(index):
                if index:
                    self._accumulate(self._kept.pop(index))
                metrics.append(self._apply_one(minibatch, version * len(totals) + index))
        return means_of(metrics) | gap | self._replayed.metrics()

    def drop(self) -> None:
        """Discards the gradients."""
        self._backend.discard_gradients()

    def _accumulate(self, packs: Sequence[Pack]) -> Sequence[torch.Tensor]:
        """Adds the gradient of packs, and returns their outputs."""
        loss = functools.partial(pack_loss, config=self._config.loss, totals=Totals(1, 1))
        outputs, sums = self._blocks.accumulate_block(packs, self._temperature, loss)
        self._sums = {name: self._sums.get(name, 0.0) + float(value) for name, value in sums.items()}
        self._replayed.add(self._backend, packs)
        return outputs

    def _apply_one(self, totals: Totals, number: int) -> dict[str, float]:
        """Applies the gradient of a mini-batch as update `number`, counted over the run. Returns its metrics."""
        is_token_mean = self._config.loss.aggregation == "token_mean"
        count = totals.num_tokens if is_token_mean else totals.num_sequences
        self._blocks.complete_blocks(1 / count)
        applied = apply_gradient(self._backend, self._config, number)
        sums, self._sums = self._sums, {}
        return {
            name: value / (count if name in _LOSSES else totals.num_tokens) for name, value in sums.items()
        } | applied
