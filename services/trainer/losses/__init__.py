"""Implements the losses as pure functions of tensors; `trainer.loss.kind` selects one of those in kinds.py.

A loss sums the values of the tokens that it is given, and each value is already divided by *global* counts. The
gradient is therefore the same for any split of the batch into micro-batches and ranks that keeps sequences whole.
"""
