"""Tests the FSDP2 backend: gradients do not depend on the split of a batch, and equal those of plain torch."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from services.common.errors import PreconditionFailed, Reason
from services.trainer.checkpoint.manifest import TrainState, begin, finish, staging
from services.trainer.updates.optim import make_optimizers
from tests.support import raises
from tests.trainer import plain_grpo
from tests.trainer.fsdp_harness import KINDS, SMALL, TEMPERATURE, UPDATES, Harness, batch_of, config, read, samples
from tests.trainer.harness_processes import few_of

# A gradient is a float32 sum over about 100 tokens through 2 layers. Another split changes the order of the additions,
# and so the roundings of 2^-24 = 6e-8 relative to the largest term. As one update passes its rounding to the next, they
# reach 2.4e-6 of the largest entry here. Local instead of global counts would change a gradient by some 10 %.
SPLIT_TOLERANCE = 5e-6
# Against float64, the rounding of the float32 forward itself counts too, and Adam makes the weights from quotients of
# such gradients.
REFERENCE_TOLERANCE = 2e-5


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    """Asserts that each tensor is as wanted, within `tolerance` times its own largest entry."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        gap = (got[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp_min(1e-12)
        assert gap <= tolerance, f"{name}: {gap:.3g}"


def assert_metrics_close(got: dict[str, float], want: dict[str, float], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        # Losses are differences of terms of size 1, so their rounding is absolute.
        assert got[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def save(harness: Harness, path: Path) -> None:
    begin(path)
    harness.worker.save(path=str(path), state={"version": 0, "last_batch_id": "", "last_metrics": {}})


def export(harness: Harness, path: Path) -> None:
    begin(path)
    harness.worker.export(path=str(path))


def stored(directory: Path) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes in the model's safetensors files."""
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found


def _splits(kind: str) -> list[tuple[int, str]]:
    return [(world, name) for world in (1, 2) for name in UPDATES if name.startswith(kind)]


@pytest.mark.parametrize("group", [*KINDS, "full", "routed_experts"])
def test_gradient_is_the_same_for_any_split(worlds: dict[int, Path], group: str) -> None:
    want, want_metrics = read(worlds[1], f"{group}-large-gradients")
    for world, name in _splits(group):
        got, metrics = read(worlds[world], f"{name}-gradients")
        assert_close(got, want, SPLIT_TOLERANCE)
        assert_metrics_close(metrics, want_metrics, SPLIT_TOLERANCE)


@pytest.mark.parametrize("group", [*KINDS, "full", "routed_experts"])
def test_weights_after_the_update_are_the_same_for_any_split(worlds: dict[int, Path], group: str) -> None:
    want, _ = read(worlds[1], f"{group}-large-weights")
    for world, name in _splits(group):
        got, _ = read(worlds[world], f"{name}-weights")
        assert_close(got, want, SPLIT_TOLERANCE)


@pytest.mark.parametrize(
    "name", ["untied-large", "tied-small", "moe-small", "routed_experts-small", "full-small", "sum-norm"]
)
def test_update_is_that_of_plain_torch(worlds: dict[int, Path], trainer_files: Path, name: str) -> None:
    kind, changes = UPDATES[name]
    rows = batch_of(name).to_pylist()
    want = plain_grpo.update(trainer_files / "models" / kind, rows, config(changes), TEMPERATURE)
    gradients, metrics = read(worlds[2], f"{name}-gradients")
    weights, _ = read(worlds[2], f"{name}-weights")
    assert_close(gradients, want.gradients, REFERENCE_TOLERANCE)
    assert_close(weights, want.weights, REFERENCE_TOLERANCE)
    for metric, value in want.metrics.items():
        assert metrics[metric] == pytest.approx(value, rel=REFERENCE_TOLERANCE, abs=REFERENCE_TOLERANCE), metric


def test_replayed_routes_are_used_and_the_router_learns(worlds: dict[int, Path]) -> None:
    gradients, metrics = read(worlds[2], "routed_experts-small-gradients")
    own, without = read(worlds[2], "moe-small-gradients")
    num_tokens = sum(len(row["prompt_tokens"]) + len(row["tokens"]) - 1 for row in samples().to_pylist())
    assert metrics["moe_replayed_tokens"] == num_tokens
    assert 0.3 < metrics["moe_router_agreement"] < 0.7  # a random half of the experts
    assert "moe_replayed_tokens" not in without
    for name, gradient in gradients.items():
        if name.endswith("mlp.gate.weight"):
            assert gradient.abs().max() > 1e-3
    with pytest.raises(AssertionError):
        assert_close(gradients, own, 100 * REFERENCE_TOLERANCE)


def test_the_comparison_sees_a_wrong_normalization(worlds: dict[int, Path]) -> None:
    # A count that is wrong by one of 12 samples would change every gradient by about as much as 11/12 does.
    want, _ = read(worlds[1], "untied-large-gradients")
    with pytest.raises(AssertionError):
        assert_close({name: tensor * 11 / 12 for name, tensor in want.items()}, want, REFERENCE_TOLERANCE)


@pytest.mark.parametrize(("kind", "budget"), few_of({("untied", 4096), ("tied", 32), ("moe", 32)}, KINDS, (4096, 32)))
def test_logprobs_are_those_of_transformers(harness: Harness, trainer_files: Path, kind: str, budget: int) -> None:
    harness.open(kind, {"max_tokens_per_microbatch": budget})
    model = AutoModelForCausalLM.from_pretrained(trainer_files / "models" / kind, dtype=torch.float32)
    rows = samples().to_pylist()
    for row, got in zip(rows, harness.logprobs(samples()), strict=True):
        with torch.no_grad():
            want, _ = plain_grpo.score(model, row, TEMPERATURE)
        # Two float32 forwards of logits of size 5 differ by a few times 5 x 2^-24.
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-5)


def test_recomputed_activations_give_the_same_gradients(worlds: dict[int, Path]) -> None:
    for world in (1, 2):
        want, want_metrics = read(worlds[world], "untied-small-gradients")
        got, metrics = read(worlds[world], "recompute-gradients")
        # These are the same operations in the same order, so not one bit differs.
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
        assert metrics == want_metrics


def test_weights_that_stay_gathered_give_the_same_updates(worlds: dict[int, Path]) -> None:
    # Two updates: weights that were gathered before the first would give the second other gradients.
    for world in (1, 2):
        for what in ("gradients", "weights"):
            want, got = (read(worlds[world], f"{name}-{what}") for name in ("full-small", "full-small-gathered"))
            assert all(torch.equal(got[0][name], tensor) for name, tensor in want[0].items())
            assert got[1] == want[1]


@pytest.mark.parametrize(("recompute", "forwards"), [(False, 1), (True, 2)])
def test_gradient_checkpointing_runs_each_layer_again(harness: Harness, recompute: bool, forwards: int) -> None:
    harness.open("untied", {"gradient_checkpointing": recompute})
    count = 0

    def entered(*_: object) -> None:
        nonlocal count
        count += 1

    harness.backend._model.causal_lm.model.layers[0].mlp.register_forward_pre_hook(entered)
    harness.train(samples())
    assert count == forwards


def test_first_update_has_ratio_one_and_no_divergence_from_itself(harness: Harness) -> None:
    harness.open("untied", {"loss": {"kl_coef": 0.5}})
    table = samples()
    index = table.schema.get_field_index("ref_logprobs")
    reference = pa.array(harness.logprobs(table, role="reference"), pa.list_(pa.float32()))
    metrics = harness.train(table.set_column(index, table.schema.field(index), reference))
    assert (metrics["ratio_mean"], metrics["kl"], metrics["clip_fraction"]) == (1.0, 0.0, 0.0)
    assert metrics["loss"] == metrics["policy_loss"]
    # The policy moved and the reference did not.
    assert np.array_equal(
        np.concatenate(harness.logprobs(table, role="reference")), np.concatenate(reference.to_pylist())
    )
    assert not np.allclose(np.concatenate(harness.logprobs(table)), np.concatenate(reference.to_pylist()), atol=1e-3)


def test_later_minibatches_are_compared_with_the_policy_before_the_batch(worlds: dict[int, Path]) -> None:
    # If each mini-batch were compared with the policy just before it, ratio_mean would be 1 in both of them.
    _, metrics = read(worlds[2], "full-small-gradients")
    assert abs(metrics["ratio_mean"] - 1) > 1e-3


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_resumed_update_is_the_one_that_would_have_been(worlds: dict[int, Path], world: int, kind: str) -> None:
    went_on, _ = read(worlds[world], f"{kind}-went-on")
    resumed, _ = read(worlds[world], f"{kind}-resumed")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in went_on.items())


def test_checkpoint_of_two_ranks_continues_on_one(worlds: dict[int, Path], harness: Harness) -> None:
    harness.open("tied", {}, checkpoint=str(worlds[2] / "adamw-checkpoint"))
    harness.train(samples(seed=5), version=1)
    assert_close(harness.parameters(), read(worlds[2], "adamw-went-on")[0], SPLIT_TOLERANCE)


def test_saving_does_not_disturb_training(harness: Harness, tmp_path: Path) -> None:
    """Tests a save before the first update, when the optimizer has no state that could be written."""
    harness.open("untied", {})
    harness.train(samples())
    want = harness.parameters()
    harness.open("untied", {})
    save(harness, tmp_path / "first")
    harness.train(samples())
    assert all(torch.equal(tensor, want[name]) for name, tensor in harness.parameters().items())
    harness.open("untied", {}, checkpoint=str(tmp_path / "first"))
    harness.train(samples())
    assert all(torch.equal(tensor, want[name]) for name, tensor in harness.parameters().items())


def test_what_is_written_in_the_background_is_what_was_copied(harness: Harness, tmp_path: Path) -> None:
    harness.open("untied", {"fsdp": {"async_save": True}})
    harness.train(samples())
    begin(tmp_path / "first")
    write = harness.backend.begin_save(staging(tmp_path / "first") / "state")
    harness.train(samples(seed=1), version=1)
    want = harness.parameters()
    write()
    finish(tmp_path / "first", TrainState(1, "b", {}))
    harness.open("untied", {}, checkpoint=str(tmp_path / "first"))
    harness.train(samples(seed=1), version=1)
    assert all(torch.equal(tensor, want[name]) for name, tensor in harness.parameters().items())


@pytest.mark.parametrize("kind", KINDS)
def test_export_is_a_model_that_transformers_loads(
    harness: Harness, trainer_files: Path, tmp_path: Path, kind: str
) -> None:
    harness.open(kind, {})
    harness.train(samples())
    export(harness, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    held = harness.parameters()
    assert {name for name, _ in exported.named_parameters()} == set(held)
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, held[name]), name
    # The files have the format of the model that was loaded: the same names, and tied weights once.
    assert stored(tmp_path / "out") == stored(trainer_files / "models" / kind)
    published = dict(harness.backend.weights())
    assert stored(tmp_path / "out") == {name: tuple(tensor.shape) for name, tensor in published.items()}
    assert [name for name, _ in harness.backend.weight_specs()] == list(published)
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == (kind == "tied")


def test_tied_embeddings_stay_one_weight(harness: Harness) -> None:
    harness.open("tied", {})
    before = harness.parameters()
    harness.train(samples())
    causal_lm = harness.backend._model.causal_lm
    assert causal_lm.lm_head.weight is causal_lm.model.embed_tokens.weight
    assert "lm_head.weight" not in before
    # The gradient has the head's part, which, unlike that of a lookup, reaches tokens that never occur.
    table = samples()
    used = {token for row in table["prompt_tokens"].to_pylist() + table["tokens"].to_pylist() for token in row}
    unused = next(token for token in range(64) if token not in used)
    moved = (harness.parameters()["model.embed_tokens.weight"] - before["model.embed_tokens.weight"])[unused]
    assert (moved + 1e-2 * 0.1 * before["model.embed_tokens.weight"][unused]).abs().max() > 1e-5


def test_bfloat16_weights_are_published_from_float32_masters(harness: Harness) -> None:
    harness.open("untied", {"compute_dtype": "bfloat16", "optim": {"lr": 1e-6}})
    before = harness.parameters()
    harness.train(samples())
    after = harness.parameters()
    # An update far below bfloat16's resolution of 2^-8 is not lost.
    assert all(tensor.dtype == torch.float32 for tensor in after.values())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert all(torch.equal(tensor, after[name].to(torch.bfloat16)) for name, tensor in harness.backend.weights())
    assert all(spec.dtype == torch.bfloat16 for _, spec in harness.backend.weight_specs())


@pytest.mark.parametrize(("bad_group", "minibatches"), few_of({(0, 1), (3, 2)}, (0, 3), (1, 2)))
def test_logprob_diff_of_any_part_of_the_batch_stops_before_anything_is_applied(
    harness: Harness, minibatches: int, bad_group: int
) -> None:
    harness.open("untied", {"num_minibatches": minibatches, "max_logprob_diff": 3.0})
    before, table = harness.parameters(), samples()
    # The difference is about 1 for the random model; a difference of 40 in one of 4 groups makes the mean about 10.
    rows = [[-40.0] * len(row) for row in table["logprobs"].to_pylist()]
    mixed = [
        bad if group == bad_group else good
        for bad, good, group in zip(rows, table["logprobs"].to_pylist(), table["group"].to_pylist(), strict=True)
    ]
    index = table.schema.get_field_index("logprobs")
    batch = table.set_column(index, table.schema.field(index), pa.array(mixed, pa.list_(pa.float32())))
    with raises(PreconditionFailed, reason=Reason.LOGPROB_DIFF) as caught:
        harness.train(batch)
    assert float(caught.value.metadata["logprob_diff_max"]) > 30
    assert all(torch.equal(tensor, before[name]) for name, tensor in harness.parameters().items())
    # What the refused batch accumulated is forgotten.
    harness.train(table)
    after = harness.parameters()
    harness.open("untied", {"num_minibatches": minibatches})
    harness.train(table)
    assert all(torch.equal(tensor, after[name]) for name, tensor in harness.parameters().items())


@pytest.mark.parametrize("minibatches", [pytest.param(1, marks=pytest.mark.long), 4])
def test_samples_of_weights_that_are_too_far_away_are_refused(harness: Harness, minibatches: int) -> None:
    # Half of the tokens had a tenth of the probability, so half of the importance weights are ten times as large.
    table = samples()
    rows = [[x - (2.3 if index % 2 else 0.0) for index, x in enumerate(row)] for row in table["logprobs"].to_pylist()]
    index = table.schema.get_field_index("logprobs")
    batch = table.set_column(index, table.schema.field(index), pa.array(rows, pa.list_(pa.float32())))
    loss = {"num_minibatches": minibatches, "max_logprob_diff": 10.0, "loss": {"old_logprobs": "engine"}}
    harness.open("untied", loss | {"lag": {"versions": 1, "min_ess": 0.95}})
    before = harness.parameters()
    with raises(PreconditionFailed, reason=Reason.LOW_ESS) as caught:
        harness.train(batch)
    ess = float(caught.value.metadata["logprob_diff_ess"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in harness.parameters().items())
    harness.open("untied", loss | {"lag": {"versions": 1, "min_ess": ess * 0.99}})
    assert harness.train(batch)["logprob_diff_ess"] == pytest.approx(ess)
    harness.open("untied", loss)
    harness.train(batch)


def test_weights_that_are_not_numbers_stop_before_anything_is_applied(harness: Harness) -> None:
    harness.open("untied", {})
    with torch.no_grad():
        next(harness.backend._model.parameters()).fill_(torch.nan)
    with raises(PreconditionFailed, reason=Reason.LOGPROB_DIFF):
        harness.train(samples())


@pytest.mark.parametrize("on_nonfinite", ["skip", "fail"])
def test_gradient_that_is_not_finite_is_not_applied(harness: Harness, on_nonfinite: str) -> None:
    harness.open("untied", {"optim": {"on_nonfinite": on_nonfinite}})
    harness.train(samples())  # so that the optimizer has moments
    before, table = harness.parameters(), samples()
    index = table.schema.get_field_index("advantages")
    huge = pa.array([[3e38] * len(row) for row in table["tokens"]], pa.list_(pa.float32()))
    table = table.set_column(index, table.schema.field(index), huge)
    if on_nonfinite == "fail":
        with raises(PreconditionFailed, reason=Reason.NONFINITE_GRADIENT):
            harness.train(table, version=1)
    else:
        metrics = harness.train(table, version=1)
        assert metrics["skipped"] == 1
        assert all(map(math.isfinite, metrics.values()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in harness.parameters().items())


def test_weight_decay_spares_norms_and_the_biases_of_experts(harness: Harness) -> None:
    harness.open("untied", {})
    named = dict(harness.backend._model.causal_lm.named_parameters())
    named["experts.down_proj_bias"] = torch.nn.Parameter(torch.zeros(4, 8))
    (adamw,) = make_optimizers(config().optim, named.items(), "model.layers.")
    groups = {group["weight_decay"]: group["params"] for group in adamw.param_groups}
    assert {name for name, p in named.items() if any(p is q for q in groups[0.0])} == {
        name for name in named if "norm" in name or "bias" in name
    }
    assert sum(map(len, groups.values())) == len(named)


def test_small_budget_makes_many_packs(harness: Harness) -> None:
    # Otherwise the comparisons above would compare a split with itself.
    harness.open("untied", SMALL)
    calls = []
    accumulate = harness.backend.accumulate
    harness.backend.accumulate = lambda microbatches, *rest, **more: (
        calls.append(len(microbatches)) or accumulate(microbatches, *rest, **more)
    )
    harness.train(samples())
    assert calls[0] >= 6
