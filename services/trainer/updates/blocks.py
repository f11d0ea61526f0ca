"""Updates the policy on a batch that arrives in blocks. Every rank runs the same code."""

import functools
from collections.abc import Sequence

from services.common.config.trainer.section import TrainerConfig
from services.trainer.backend import AddsBlocks, Backend
from services.trainer.losses import Totals
from services.trainer.updates.gap import Gaps, require_agreement
from services.trainer.updates.packing import Pack
from services.trainer.updates.policy import apply_gradient, pack_loss
from services.trainer.updates.replayed import Replayed

# Metrics that are divided by the same count as the loss; the others are means over tokens.
_LOSSES = ("loss", "policy_loss")


class BlockUpdate:
    """One update of the policy, in one mini-batch.

    The counts that the loss is divided by are known only at the end. So each block adds the gradient of the sum of its
    losses, and `apply` divides once, in float32. Discards gradients that an earlier update has left.
    """

    def __init__(self, backend: Backend, config: TrainerConfig, temperature: float):
        assert isinstance(backend, AddsBlocks), "TrainerConfig.adds_blocks, which the servicer requires"
        self._backend, self._blocks = backend, backend
        self._config, self._temperature = config, temperature
        self._sums: dict[str, float] = {}
        self._gaps, self._replayed = Gaps(), Replayed()
        backend.discard_gradients()

    def add(self, packs: Sequence[Pack]) -> None:
        """Adds the gradient of this rank's packs of a block."""
        loss = functools.partial(pack_loss, config=self._config.loss, totals=Totals(1, 1))
        outputs, sums = self._blocks.accumulate_block(packs, self._temperature, loss)
        self._sums = {name: self._sums.get(name, 0.0) + float(value) for name, value in sums.items()}
        self._gaps.add(packs, outputs)
        self._replayed.add(self._backend, packs)

    def apply(self, totals: Totals, version: int) -> dict[str, float]:
        """Applies the gradient to the policy, which is at `version`. Returns metrics, the same on every rank.

        Raises:
            PreconditionFailed: The engine's and the trainer's log-probabilities differ too much. Nothing is applied.
            FloatingPointError: The gradient is not finite. The weights are corrupt and must not be used.
        """
        gap = require_agreement(self._backend, self._gaps, totals.num_tokens, self._config)
        is_token_mean = self._config.loss.aggregation == "token_mean"
        count = totals.num_tokens if is_token_mean else totals.num_sequences
        self._blocks.complete_blocks(1 / count)
        applied = apply_gradient(self._backend, self._config, version)
        means = {name: value / (count if name in _LOSSES else totals.num_tokens) for name, value in self._sums.items()}
        return means | applied | gap | self._replayed.metrics()

    def drop(self) -> None:
        """Discards the gradients."""
        self._backend.discard_gradients()
