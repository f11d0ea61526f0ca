"""Lets single modules of a model compute padded rows while all others compute packed tokens.

A module with a convolution or a recurrent state would carry it from one packed sequence into the next. It gets its
input as rows instead, a sequence in each, padded on the right: what is causal never looks there, so the padding needs
no mask and changes nothing.
"""

from typing import Any

import torch
from torch import nn


class Rows:
    """The rows of the micro-batch that is computed, of B sequences and L tokens of the longest."""

    def __init__(self) -> None:
        self._is_token_BL: torch.Tensor | None = None

    def begin(self, cu_seqlens_B1: torch.Tensor, longest: int) -> None:
        """Sets the sequences of the forward passes that follow, and of their backward passes."""
        positions_L = torch.arange(longest, device=cu_seqlens_B1.device)
        self._is_token_BL = positions_L[None, :] < cu_seqlens_B1.diff()[:, None]

    def scatter(self, packed_TX: torch.Tensor) -> torch.Tensor:
        """Returns rows [B, L, ...] of packed values [T, ...], zero where a row has no token."""
        assert self._is_token_BL is not None, "begin was called"
        rows = packed_TX.new_zeros(*self._is_token_BL.shape, *packed_TX.shape[1:])
        rows[self._is_token_BL] = packed_TX
        return rows

    def gather(self, rows_BLX: torch.Tensor) -> torch.Tensor:
        """Returns the packed values [T, ...] of rows [B, L, ...]."""
        assert self._is_token_BL is not None, "begin was called"
        return rows_BLX[self._is_token_BL]

    def add_to(self, decoder: nn.Module) -> bool:
        """Makes every module that owns a convolution over tokens compute rows. Returns whether there is any.

        In transformers' models, whatever keeps a state from token to token begins with such a convolution.
        """
        owners = [
            module for module in decoder.modules() if any(isinstance(child, nn.Conv1d) for child in module.children())
        ]
        for owner in owners:
            self._compute_rows(owner)
        return bool(owners)

    def _compute_rows(self, module: nn.Module) -> None:
        forward = module.forward

        def of_rows(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> Any:
            # Masks, positions and caches do not apply to the rows, and none is needed.
            result = forward(self.scatter(hidden_states[0]))
            if isinstance(result, tuple):
                return self.gather(result[0])[None], *result[1:]
            return self.gather(result)[None]

        module.forward = of_rows
