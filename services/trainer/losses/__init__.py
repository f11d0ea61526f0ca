"""Losses: pure functions of tensors, one file each, found by `trainer.loss.kind`.

A loss is a sum over the tokens at hand of values that are already divided by *global* counts, so the gradient is the
same for any split of the batch into micro-batches and ranks, as long as sequences stay whole.
"""

from services.trainer.losses.policy import LOSSES, policy_loss
from services.trainer.losses.terms import Totals
from services.trainer.losses.value import explained_variance, value_loss

__all__ = ["LOSSES", "Totals", "explained_variance", "policy_loss", "value_loss"]
