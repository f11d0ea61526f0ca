"""Implements the losses as pure functions of tensors; `trainer.loss.kind` selects one of those in kinds.py.

A loss sums the values of the tokens that it is given, and each value is already divided by *global* counts. The
gradient is therefore the same for any split of the batch into micro-batches and ranks that keeps sequences whole.
"""

from services.trainer.losses.kinds import Totals
from services.trainer.losses.policy import LOSSES, distill_loss, explained_variance, policy_loss, value_loss

__all__ = ["LOSSES", "Totals", "distill_loss", "explained_variance", "policy_loss", "value_loss"]
