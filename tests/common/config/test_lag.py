"""Tests which losses may be trained on samples of earlier weights."""

from typing import Any

import pytest

from services.common.config.streaming import streams, tokens_per_block
from services.common.config.trainer import TrainerConfig
from tests.common.config.test_streaming import config

ENGINE = {"old_logprobs": "engine"}
LAG = {"versions": 1}

ALLOWED: dict[str, dict[str, Any]] = {
    **{kind: {"loss": {"kind": kind, **ENGINE}} for kind in ("grpo", "ppo", "gspo", "gmpo", "cispo", "sapo", "dppo")},
    "corrected": {"loss": {"correction": {"weight": "token"}}, "num_minibatches": 2},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        kind: ({"loss": {"kind": kind, **ENGINE}}, f"not {kind}") for kind in ("reinforce", "clip_cov", "kl_cov", "sft")
    },
    "an own loss": ({"loss": {"kind": "python", "import_path": "a.b:c", **ENGINE}}, "not python"),
    "ratios that are always 1": ({"loss": {"old_logprobs": "on_policy"}}, "old_logprobs on_policy"),
    "recomputed, one update": ({"loss": {"correction": {"weight": "token"}}}, "old_logprobs recompute"),
    "recomputed, not corrected": ({"num_minibatches": 2}, "old_logprobs recompute"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_losses_with_a_bounded_ratio_to_the_sampled_weights(case: str) -> None:
    assert TrainerConfig(lag=LAG, **ALLOWED[case]).lag.versions == 1


@pytest.mark.parametrize("case", REFUSED)
def test_others_are_refused(case: str) -> None:
    changes, problem = REFUSED[case]
    TrainerConfig(**changes)
    with pytest.raises(ValueError, match=problem):
        TrainerConfig(lag=LAG, **changes)


def test_a_critic_and_a_gate_without_a_lag_are_refused() -> None:
    critic = {"advantage": {"kind": "gae"}, "critic": {}}
    with pytest.raises(ValueError, match="critic"):
        config(trainer={"lag": LAG, "loss": ENGINE}, **critic)
    with pytest.raises(ValueError, match=r"lag\.min_ess has no effect"):
        TrainerConfig(lag={"min_ess": 0.9})


def test_the_batch_is_complete_before_its_update_and_has_the_same_blocks() -> None:
    lagged = config(trainer={"lag": LAG, "loss": ENGINE})
    assert (tokens_per_block(lagged), streams(lagged)) == (tokens_per_block(config()), False)


def test_reference_and_teacher_have_no_lag() -> None:
    distilled = {"advantage": {"distill_coef": 0.5}, "teacher": {"model": "t"}}
    lagged = config(trainer={"lag": LAG, "loss": {"kl_coef": 0.1, **ENGINE}}, **distilled)
    assert lagged.models["reference"].lag.versions == lagged.models["teacher"].lag.versions == 0
