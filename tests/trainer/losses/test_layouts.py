"""Tests that every policy loss gives the same update for any split over micro-batches and ranks of both backends.

One FSDP rank with a mini-batch in one micro-batch is the reference. It is compared with plain torch.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.common.config.loss import Aggregation, LossConfig
from services.trainer.losses.policy import LOSSES as KINDS
from tests.trainer import plain_grpo
from tests.trainer.fsdp_harness import TEMPERATURE, config, read
from tests.trainer.harness_processes import few_of, marked, run_harness, to_run
from tests.trainer.loss_harness import FEW, HALVES, LAYOUTS, LONG, LOSSES, MISTAKES, REFERENCE, TOP_K, WHOLE, batch_of

# Metrics are means of 70 terms of size 1 to 10, and the norm of 1e5 numbers. In float32, another order of additions
# changes them by up to 8e-7 here. The losses jump where a ratio meets a bound; none of these tokens is so near to a
# bound that rounding moves it across.
METRIC_TOLERANCE = 5e-6
# A tensor's weights move by a sum of two gradients, each of some 70 tokens; relative to the tensor's largest move, the
# moves differ by up to 1e-6 here. On top, a weight is rounded after each of the two updates, and another order of
# additions may round it to the neighboring float. For norms, of size 1, that is up to 5e-5 of their move of 2e-3; for
# matrices it does not matter.
MOVE_TOLERANCE = 5e-6
WEIGHT_ROUNDING = 2 * 2**-23
# Against float64, the rounding of the float32 forward itself counts too; see tests/trainer/fsdp/test_backend.py.
REFERENCE_TOLERANCE = 2e-5
# Log-probabilities of up to 8 have roundings of 2.4e-7; the forward and the sum over the vocabulary have a few dozen.
LOGPROB_TOLERANCE = 1e-5
CONFIGS = {name: LossConfig.model_validate(loss) for name, loss in LOSSES.items()}
COMPARED = [name for name in LAYOUTS if name != REFERENCE]
TELLING = [
    (layout, loss) for layout in COMPARED for loss in LOSSES if layout not in LONG and (layout in WHOLE or loss in FEW)
]
FRACTIONS = ("clip_fraction", "clip_dual_fraction", "covariance_fraction", "correction_masked")

Tensors = Mapping[str, torch.Tensor]
_read = functools.cache(read)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, trainer_files: Path) -> Path:
    """Runs loss_harness; returns the directory of its results."""
    out = trainer_files / "loss"
    run_harness("loss_harness", out, out, to_run(request, __file__, LAYOUTS, LONG))
    return out


@pytest.fixture(scope="module")
def before(trainer_files: Path) -> Tensors:
    """Provides the weights that every update starts from."""
    return load_file(trainer_files / "models" / "untied" / "model.safetensors")


def result(directory: Path, layout: str, loss: str) -> tuple[Tensors, dict[str, float]]:
    """Returns the weights after the update with this loss in this layout, and its metrics."""
    tensors, metrics = _read(directory, layout)
    return {name.split("/")[1]: tensor for name, tensor in tensors.items() if name.split("/")[0] == loss}, metrics[loss]


def worst_move(got: Tensors, want: Tensors, before: Tensors) -> float:
    """Returns the largest difference of any tensor between `got` and `want`, relative to the largest move of that
    tensor.

    What may be rounding of the tensor's weights does not count as a difference.
    """
    assert got.keys() == want.keys() == before.keys()
    gaps = []
    for name, start in before.items():
        gap = (got[name].double() - want[name].double()).abs().max() - WEIGHT_ROUNDING * start.abs().max()
        gaps.append(float(gap / (want[name].double() - start.double()).abs().max()))
    return max(gaps)


@pytest.mark.parametrize(("layout", "loss"), few_of(TELLING, COMPARED, LOSSES))
def test_split_does_not_change_the_update(results: Path, before: Tensors, layout: str, loss: str) -> None:
    weights, metrics = result(results, layout, loss)
    want, want_metrics = result(results, REFERENCE, loss)
    assert metrics == pytest.approx(want_metrics, rel=METRIC_TOLERANCE, abs=METRIC_TOLERANCE)
    assert worst_move(weights, want, before) <= MOVE_TOLERANCE


@pytest.mark.parametrize("layout", marked(COMPARED, LONG))
def test_most_probable_tokens_are_the_same_in_every_layout(results: Path, layout: str) -> None:
    got, want = (_read(results, f"{name}-top_k")[0] for name in (layout, REFERENCE))
    assert torch.equal(got["tokens"], want["tokens"])
    torch.testing.assert_close(got["logprobs"], want["logprobs"], rtol=0, atol=LOGPROB_TOLERANCE)


def test_most_probable_tokens_are_those_of_plain_torch(results: Path, trainer_files: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trainer_files / "models" / "untied", dtype=torch.float64)
    got = _read(results, f"{REFERENCE}-top_k")[0]
    with torch.no_grad():
        rows = batch_of("sampling_mask").to_pylist()
        whole = torch.cat([plain_grpo.distributions(model, row, TEMPERATURE) for row in rows])
        probs, tokens = whole.topk(TOP_K)
        probs = torch.cat([probs, whole.scatter(1, tokens, 0).sum(1, keepdim=True)], 1)
    tokens[probs[:, :-1] == 0] = -1
    assert torch.equal(got["tokens"].long(), tokens)
    found, want = got["logprobs"].double(), probs.log().where(probs > 0, 0)
    found = found.where(found > -1e20, 0)  # the rest of a mask that has no other token
    torch.testing.assert_close(found, want, rtol=0, atol=LOGPROB_TOLERANCE)
    assert (tokens == -1).any()  # sampling masks of fewer tokens


@pytest.mark.parametrize("loss", [name for name, loss in CONFIGS.items() if loss.old_logprobs == "recompute"])
def test_reference_is_plain_torch(results: Path, trainer_files: Path, before: Tensors, loss: str) -> None:
    settings = config(HALVES | {"loss": LOSSES[loss]})
    want = plain_grpo.update(trainer_files / "models" / "untied", batch_of(loss).to_pylist(), settings, TEMPERATURE)
    weights, metrics = result(results, REFERENCE, loss)
    assert worst_move(weights, want.weights, before) <= REFERENCE_TOLERANCE
    for name, value in want.metrics.items():
        assert metrics[name] == pytest.approx(value, rel=REFERENCE_TOLERANCE, abs=REFERENCE_TOLERANCE), name


def test_every_loss_is_compared_where_a_wrong_split_would_show(results: Path, before: Tensors) -> None:
    assert {loss.kind for loss in CONFIGS.values()} == KINDS.keys()
    assert {loss.aggregation for loss in CONFIGS.values()} == {*get_args(Aggregation)}
    for name, loss in CONFIGS.items():
        weights, metrics = result(results, REFERENCE, name)
        assert all(0.05 < metrics[fraction] < 0.95 for fraction in FRACTIONS if fraction in metrics), (name, metrics)
        assert abs(metrics["ratio_mean"] - 1) > 1e-3 or not loss.is_sampled
        assert abs(metrics["loss"]) > 1000 * METRIC_TOLERANCE  # the loss has an absolute tolerance
        assert metrics["grad_norm"] > 0.5
        assert all((weights[key] - start).abs().max() > 1e-3 for key, start in before.items())
    assert 0.05 < result(results, REFERENCE, "cispo")[1]["correction_truncated"] < 0.95


@pytest.mark.parametrize("layout", MISTAKES)
def test_comparison_sees_a_mistake(results: Path, before: Tensors, layout: str) -> None:
    for loss in MISTAKES[layout][1]:
        weights, metrics = result(results, f"{layout}-mistaken", loss)
        want, want_metrics = result(results, REFERENCE, loss)
        off: dict[str, Any] = {name: abs(metrics[name] / want_metrics[name] - 1) for name in ("loss", "grad_norm")}
        assert min(off.values()) > 1000 * METRIC_TOLERANCE, (loss, off)
        assert worst_move(weights, want, before) > 1000 * MOVE_TOLERANCE
