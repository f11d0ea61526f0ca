"""Policy losses: pure functions of tensors, one file each, found by `trainer.loss.kind`.

A loss is a sum over the tokens at hand of values that are already divided by *global* counts, so the gradient is the
same for any split of the batch into micro-batches and ranks.
"""

from services.trainer.losses.grpo import grpo
from services.trainer.losses.terms import Totals

LOSSES = {"grpo": grpo}

__all__ = ["LOSSES", "Totals"]
