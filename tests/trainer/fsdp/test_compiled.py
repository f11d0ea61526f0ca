"""Tests which micro-batches a compiled layer computes. CI has no GPU, so nothing is compiled here."""

import pytest
import torch

from services.trainer.fsdp import loading


def test_small_micro_batches_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler would make other code for them in the middle of a run."""

    def forward(hidden_states: torch.Tensor, scale: float) -> tuple[str, float]:
        return "as it is", scale

    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: lambda *args, **kwargs: "compiled")
    layer = loading._compiled(forward, fewest=8)
    assert layer(torch.zeros(1, 8, 2), 0.5) == layer(hidden_states=torch.zeros(2, 4, 2), scale=0.5) == "compiled"
    assert layer(torch.zeros(1, 7, 2), scale=0.5) == ("as it is", 0.5)
