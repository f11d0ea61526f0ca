"""Tests importance weights and masks by hand, and the configs that are refused."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from services.common.config.loss import CorrectionConfig, LossConfig
from services.trainer.losses.kinds import Tokens
from services.trainer.losses.policy import Totals, correction, policy_loss

# Sequences of 3, 2 and 2 tokens, the second token of the first masked; old / behavior probability.
RATIOS = [0.5, 1e-9, 3.0, 2.0, 4.0, 1.1, 0.9]
LENGTHS = (3, 2, 2)
MASK_N = torch.tensor([1.0, 0, 1, 1, 1, 1, 1])
PRODUCTS = [1.5, 1.5, 1.5, 8.0, 8.0, 0.99, 0.99]


def columns() -> dict[str, torch.Tensor]:
    return {
        "old_logprobs": torch.full((7,), -1.0, dtype=torch.float64),
        "behavior_logprobs": -1 - torch.tensor(RATIOS, dtype=torch.float64).log(),
        "advantages": torch.ones(7, dtype=torch.float64),
        "loss_mask": MASK_N,
        "completion_length": torch.tensor([2.0, 2, 2, 2, 2, 2, 2]),
    }


# Factor of each token, and which are masked or truncated; the masked token has ratio 1 and counts nowhere.
CASES: list[tuple[dict[str, Any], list[float], list[int], list[int]]] = [
    ({"weight": "token", "weight_cap": 2.5}, [0.5, 1, 2.5, 2, 2.5, 1.1, 0.9], [], [2, 4]),
    ({"weight": "sequence", "weight_cap": 2.5}, [1.5, 1.5, 1.5, 2.5, 2.5, 0.99, 0.99], [], [3, 4]),
    ({"token_mask": (0.6, 2.0)}, [0, 1, 0, 1, 0, 1, 1], [0, 2, 4], []),
    # IcePop: the ratio itself within its bounds, 0 outside.
    ({"weight": "token", "weight_cap": 5.0, "token_mask": (0.6, 3.5)}, [0, 1, 3, 2, 0, 1.1, 0.9], [0, 4], []),
    ({"geometric_mask": (0.9, 1.3)}, [1, 1, 1, 0, 0, 1, 1], [3, 4], []),
    ({"geometric_mask": (0.999, 3.0)}, [1, 1, 1, 1, 1, 0, 0], [5, 6], []),
    ({"veto": 0.6}, [0, 0, 0, 1, 1, 1, 1], [0, 1, 2], []),
    ({"veto": 1e-4}, [1] * 7, [], []),
    ({"veto": 0.95, "weight": "token", "weight_cap": 3.0}, [0, 0, 0, 2, 3, 0, 0], [0, 1, 2, 5, 6], [4]),
]


@pytest.mark.parametrize(("settings", "factors", "masked", "truncated"), CASES, ids=lambda value: str(value)[:40])
def test_factors(settings: dict[str, Any], factors: list[float], masked: list[int], truncated: list[int]) -> None:
    logprobs_N = torch.full((7,), -2.0, dtype=torch.float64, requires_grad=True)
    config = CorrectionConfig(**settings)
    factor_N, metrics = correction(Tokens.of(logprobs_N, columns(), LENGTHS), config)
    assert factor_N.tolist() == pytest.approx(factors, rel=1e-14)
    assert not factor_N.requires_grad
    assert metrics["correction_masked"].nonzero()[:, 0].tolist() == masked
    assert metrics["correction_truncated"].nonzero()[:, 0].tolist() == truncated
    # Each factor is on its token's gradient; what the batch is divided by stays.
    outputs = torch.stack([logprobs_N, torch.zeros_like(logprobs_N)])
    loss_config = LossConfig(kind="reinforce", correction=config)
    loss, metrics = policy_loss(outputs, columns(), LENGTHS, Totals(6, 3), loss_config)
    loss.backward()
    want = [-factor * mask / 6 for factor, mask in zip(factors, MASK_N.tolist(), strict=True)]
    assert logprobs_N.grad.tolist() == pytest.approx(want, rel=1e-7)
    assert metrics["correction_mean"].item() == pytest.approx(-sum(want), rel=1e-7)
    for name, tokens in (("masked", masked), ("truncated", truncated)):
        total = sum(float(MASK_N[token]) for token in tokens)
        assert metrics[f"correction_{name}"].item() == pytest.approx(total / 6, rel=1e-7)


def test_nothing_is_corrected_unless_asked() -> None:
    tokens = Tokens.of(torch.full((7,), -2.0, dtype=torch.float64), columns(), LENGTHS)
    factor_N, metrics = correction(tokens, CorrectionConfig())
    assert (factor_N.tolist(), metrics) == ([1.0] * 7, {})


def test_weights_that_overflow_are_truncated() -> None:
    far = columns() | {"behavior_logprobs": torch.full((7,), -2000.0, dtype=torch.float64)}
    tokens = Tokens.of(torch.full((7,), -2.0, dtype=torch.float64), far, LENGTHS)
    for weight in ("token", "sequence"):
        factor_N, _ = correction(tokens, CorrectionConfig(weight=weight))
        assert factor_N[MASK_N > 0].tolist() == [2.0] * 6


def test_kl_and_entropy_are_not_corrected() -> None:
    dropped = CorrectionConfig(token_mask=(1.0, 1.0))
    inputs = columns() | {"ref_logprobs": torch.full((7,), -3.0, dtype=torch.float64)}
    outputs = torch.stack([torch.full((7,), -2.0, dtype=torch.float64), torch.ones(7, dtype=torch.float64)])
    config = LossConfig(kl_coef=1.0, kl_kind="k1", entropy_coef=0.25, correction=dropped)
    loss, metrics = policy_loss(outputs, inputs, LENGTHS, Totals(6, 3), config)
    assert metrics["policy_loss"] == 0
    assert loss.item() == pytest.approx(1 - 0.25, rel=1e-6)


REFUSED = [
    ({"clip_dual": 1.0}, "clip_dual"),
    ({"clip_dual": 3.0, "kind": "gspo"}, "clip_dual is not read by kind gspo"),
    ({"clip_low": 3e-4, "kind": "gspo"}, "clip_low is not read by kind gspo"),
    ({"gspo": {"clip_low": 0.1}}, "gspo is not read by kind grpo, only by gspo: leave it out"),
    ({"kind": "sft", "sapo": {"tau_positive": 2.0}}, "sapo is not read by kind sft"),
    ({"correction": {"weight": "token"}, "old_logprobs": "engine"}, "old_logprobs engine"),
    ({"correction": {"veto": 0.1}, "kind": "sft"}, "kind sft"),
    ({"correction": {"weight_cap": 3.0}}, "weight is none"),
    ({"correction": {"weight": "token", "weight_cap": 0.5}}, "weight_cap"),
    ({"correction": {"token_mask": (2.0, 0.5)}}, "token_mask"),
    ({"correction": {"token_mask": (0.5, math.nan)}}, "token_mask"),
    ({"correction": {"geometric_mask": (1.1, 2.0)}}, "geometric_mask"),
    ({"correction": {"veto": 1.0}}, "veto"),
    ({"kl_kind": "k4"}, "kl_kind"),
    ({"old_logprobs": "trainer"}, "old_logprobs"),
    ({"kind": "gpro"}, "kind"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_config_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LossConfig(**settings)


def test_config_survives_its_own_json() -> None:
    config = LossConfig(
        kind="gspo",
        gspo={"clip_low": 0.01},
        kl_kind="k2",
        correction={"weight": "sequence", "token_mask": (0.5, 5.0), "veto": 1e-4},
    )
    assert LossConfig.model_validate_json(config.model_dump_json()) == config
