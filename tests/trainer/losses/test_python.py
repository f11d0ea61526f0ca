"""Tests that a user's loss is called like the built-in kinds, and that its mistakes are named."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from services.common.config.loss import LossConfig
from services.common.errors import InvalidInput
from services.trainer.losses.kinds import require_importable
from services.trainer.losses.policy import Totals, policy_loss
from tests.support import raises


def loss_of(path: str, **kwargs: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    config = LossConfig(kind="python", import_path=path, kwargs=kwargs)
    logprobs_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    ones_N = torch.ones(2)
    columns = {"loss_mask": ones_N, "completion_length": 2 * ones_N, "advantages": torch.tensor([1.0, -3.0])}
    columns |= {"old_logprobs": torch.tensor([-1.5, -2.0]), "behavior_logprobs": logprobs_N}
    return policy_loss(torch.stack([logprobs_N, ones_N]), columns, (2,), Totals(2, 1), config)


def test_its_losses_are_weighted_and_its_metrics_averaged() -> None:
    loss, metrics = loss_of("tests.user_functions:soft_clip", temperature=2.0)
    weight = torch.exp(torch.tensor(-1.0))
    want = (-torch.exp(torch.tensor(0.5)) * weight + 3.0) / 2
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    assert metrics["weight_mean"].item() == pytest.approx((weight.item() + 1) / 2, rel=1e-6)


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"misshapen returned loss of shape \[1\].* each of the 2 tokens"):
        loss_of("tests.user_functions:misshapen")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("only_loss", "must return the loss and a dict of metrics"),
        ("number", "returned half as float; it must be a tensor with one value for each of the 2 tokens"),
        ("detached", "returned a loss without gradient: compute it from tokens.logprobs_N or tokens.log_ratio_N"),
        ("raises", r"raised KeyError: 'column' \(.*user_functions.py, line \d+\)"),
    ],
)
def test_a_mistake_in_the_function_is_named(name: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=f"trainer.loss.import_path: tests.user_functions:{name} {why}"):
        loss_of(f"tests.user_functions:{name}")


def test_what_is_not_finite_at_a_masked_token_changes_no_gradient() -> None:
    config = LossConfig(kind="python", import_path="tests.user_functions:divides")
    logprobs_N = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    columns = {"loss_mask": torch.tensor([1.0, 0, 1]), "completion_length": torch.full((3,), 2.0)}
    columns |= {"advantages": torch.tensor([1.0, 0, -3.0]), "old_logprobs": logprobs_N.detach()}
    columns["behavior_logprobs"] = logprobs_N.detach()
    loss, _ = policy_loss(torch.stack([logprobs_N, torch.zeros(3)]), columns, (3,), Totals(2, 1), config)
    loss.backward()
    assert loss.item() == 0  # (-1 + 1) / 2
    assert logprobs_N.grad is not None and logprobs_N.grad.tolist() == [-0.5, 0, 0.5]


def test_a_metric_that_every_update_has_is_refused() -> None:
    _, metrics = loss_of("tests.user_functions:names", metric="kl")  # there is no other, without a KL penalty
    for name in {*metrics, "grad_norm", "lr", "skipped"} - {"kl"}:
        with raises(InvalidInput, field="trainer.loss.import_path"):
            loss_of("tests.user_functions:names", metric=name)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("tests.no_such_module:f", "cannot be imported: No module named"),
        ("tests.user_functions:no_such", "cannot be imported: .* has no attribute"),
        ("tests.user_functions:NOT_A_FUNCTION", "is not a function"),
    ],
)
def test_what_cannot_be_imported_is_refused_before_a_run(path: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=f"trainer.loss.import_path: {path} {why}"):
        require_importable(LossConfig(kind="python", import_path=path))


def test_a_function_that_does_not_take_the_arguments_is_refused_before_a_run() -> None:
    config = LossConfig(kind="python", import_path="tests.user_functions:soft_clip", kwargs={"warmth": 1})
    with pytest.raises(InvalidInput, match=r"soft_clip is called with .* unexpected keyword argument 'warmth'"):
        require_importable(config)


def test_a_module_that_raises_while_it_is_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lockstep_raising_loss.py").write_text("raise ValueError('no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput, match="lockstep_raising_loss:f cannot be imported: no such file"):
        require_importable(LossConfig(kind="python", import_path="lockstep_raising_loss:f"))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kind": "python"}, "kind python needs import_path"),
        ({"kind": "grpo", "import_path": "a:b"}, "import_path is not read by kind grpo"),
        ({"kind": "grpo", "kwargs": {"a": 1}}, "kwargs is not read by kind grpo"),
        ({"kind": "python", "import_path": "os.system('x')"}, "should match pattern"),
    ],
)
def test_its_config_is_checked(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        LossConfig.model_validate(fields)
