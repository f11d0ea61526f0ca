"""Tests that the Megatron backend has the same weights, log-probabilities and updates in every layout.

They are those of one process, of FSDP2, and of transformers.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support import make_model, with_routed_experts
from tests.trainer import plain_grpo
from tests.trainer.fsdp_harness import FULL_LOSS, TEMPERATURE, Harness, samples
from tests.trainer.harness_processes import marked, run_harness, to_run
from tests.trainer.megatron_harness import content
from tests.trainer.megatron_layouts import LAYOUTS, LONG, LOSS

WORLDS = (1, 2, 4)
# Log-probabilities are float32 logits of size 5 less their normalizer, which are a few roundings of 5 x 2^-24 = 3e-7. A
# sum in another order changes them by up to 2e-6 here, and by up to 6e-6 after the updates; 1e-4 is required.
LOGPROB_TOLERANCE = 1e-5
# Metrics are means of 100 terms of size 1, and the norm of a gradient of 1e5 numbers; none is off by more than 1.5e-6.
METRIC_TOLERANCE = 5e-6
# Relative to a tensor's largest entry, weights differ by up to 1e-6 here, after two updates of up to 3e-2. If only the
# all-reduce of the norms' gradients is missing, they differ by 5e-2; see the test of it.
WEIGHT_TOLERANCE = 3e-6
COMPARED = [name for name, layout in LAYOUTS.items() if layout.like and not layout.has_broken_norms]
# These layouts do the same operations in the same order as those that they are compared with.
IDENTICAL = [name for name, layout in LAYOUTS.items() if layout.like and ("offload" in name or "recompute" in name)]
KINDS = ("untied", "tied", "moe", "deep")


class Result:
    """Reads the results of one layout, before and after its updates."""

    def __init__(self, directory: Path, name: str):
        def content(when: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
            file = directory / f"world{LAYOUTS[name].world}" / f"{name}-{when}"
            return load_file(f"{file}.safetensors"), json.loads(Path(f"{file}.json").read_text())

        self.before, answers = content("before")
        self.logprobs, self.reference = answers["logprobs"], answers["reference"]
        self.published: list[tuple[int, str, str]] = answers["published"]
        self.most_sent_together: int = answers["most_sent_together"]
        self.after, answers = content("after")
        self.after_logprobs, self.updates = answers["logprobs"], answers["updates"]
        self.bytes_here: list[dict[str, int]] = answers["bytes_here"]


@pytest.fixture(scope="session")
def megatron(request: pytest.FixtureRequest, trainer_files: Path) -> Path:
    """Runs the layouts, one world size after the other; returns a directory with the results in world<n>."""
    for kind in ("deep", "deep-moe"):
        make_model(trainer_files / "models" / kind, kind)
    directory = trainer_files / "megatron"
    directory.mkdir()
    (directory / "models").symlink_to(trainer_files / "models")
    names = to_run(request, __file__, LAYOUTS, LONG)
    for world in WORLDS:
        of_world = directory / f"world{world}"
        run_harness("megatron_harness", of_world, world, of_world, [n for n in names if LAYOUTS[n].world == world])
    return directory


def assert_weights_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        gap = (got[name].double() - tensor.double()).abs().max() / tensor.double().abs().max()
        assert gap <= tolerance, f"{name}: {gap:.3g}"


def assert_rows_close(got: list[list[float]], want: list[list[float]], tolerance: float) -> None:
    assert list(map(len, got)) == list(map(len, want))
    np.testing.assert_allclose(np.concatenate(got), np.concatenate(want), rtol=0, atol=tolerance)


def assert_updates_close(got: list[dict[str, float]], want: list[dict[str, float]], tolerance: float) -> None:
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        # Losses are differences of terms of size 1, so their rounding is absolute.
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", marked(LAYOUTS, LONG))
def test_weights_of_a_fresh_model_are_the_checkpoints_bit_by_bit(
    megatron: Path, trainer_files: Path, name: str
) -> None:
    layout = LAYOUTS[name]
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    stored = load_file(trainer_files / "models" / layout.kind / "model.safetensors")
    exported = Result(megatron, name).before
    assert exported.keys() == stored.keys()
    for key, tensor in stored.items():
        assert exported[key].dtype == dtype
        assert torch.equal(exported[key], tensor.to(dtype)), key


@pytest.mark.parametrize("name", marked(LAYOUTS, LONG))
def test_every_weight_is_sent_by_one_rank_and_all_that_hold_weights_send(megatron: Path, name: str) -> None:
    result, sizes = Result(megatron, name), LAYOUTS[name].megatron
    assert sorted(name for _, name, _ in result.published) == sorted(result.before)
    for _, key, sent in result.published:
        assert sent == content(result.before[key]), key
    kinds = ("tensor_model", "pipeline_model", "expert_model")
    num_parts = math.prod(sizes.get(f"{kind}_parallel_size", 1) for kind in kinds)
    assert (len({rank for rank, _, _ in result.published}) > 1) == (num_parts > 1)


@pytest.mark.parametrize(("name", "num_tensors"), [("moe-1", 4), ("moe-ep2-aux", 4), ("untied-1", 1)])
def test_experts_of_a_block_are_sent_together(megatron: Path, name: str, num_tensors: int) -> None:
    """Tests that gate and up of two experts, which are a block, come at once."""
    assert Result(megatron, name).most_sent_together == num_tensors


@pytest.mark.parametrize("name", marked(COMPARED, LONG))
def test_layout_does_not_change_the_result(megatron: Path, name: str) -> None:
    got, want = Result(megatron, name), Result(megatron, LAYOUTS[name].like)
    assert_rows_close(got.logprobs, want.logprobs, LOGPROB_TOLERANCE)
    assert_updates_close(got.updates, want.updates, METRIC_TOLERANCE)
    assert_weights_close(got.after, want.after, WEIGHT_TOLERANCE)
    # The harness asks for these before it asks for the weights, so an update that is still to be gathered would show.
    assert_rows_close(got.after_logprobs, want.after_logprobs, LOGPROB_TOLERANCE)
    if want.reference:
        assert_rows_close(got.reference, want.reference, LOGPROB_TOLERANCE)


def test_the_comparison_is_of_updates_that_change_much(megatron: Path) -> None:
    # Otherwise the comparison would also hold for a backend that does nothing.
    for kind in KINDS:
        result = Result(megatron, f"{kind}-1")
        assert all(abs(update["loss"]) > 1 and update["grad_norm"] > 1 for update in result.updates)
        moved = [(result.after[name] - tensor).abs().max() for name, tensor in result.before.items()]
        assert min(moved) > 1e-3, list(result.before)[int(np.argmin(moved))]
        shift = np.concatenate(result.after_logprobs) - np.concatenate(result.logprobs)
        assert np.abs(shift).max() > 0.1


def test_replayed_experts_are_used_by_every_layer_and_the_router_learns(megatron: Path) -> None:
    result, own = Result(megatron, "routed-1"), Result(megatron, "moe-1")
    for seed, update in enumerate(result.updates):
        rows = samples(seed).to_pylist()
        num_tokens = sum(len(row["prompt_tokens"]) + len(row["tokens"]) - 1 for row in rows)
        assert update["moe_replayed_tokens"] == num_tokens
        assert 0.3 < update["moe_router_agreement"] < 0.7  # a random half of the experts
    moved = [(result.after[key] - tensor).abs().max() for key, tensor in result.before.items() if "mlp.gate." in key]
    assert min(moved) > 1e-3
    with pytest.raises(AssertionError):  # the comparisons of layouts would see routers that choose for themselves
        assert_rows_close(result.logprobs, own.logprobs, 100 * LOGPROB_TOLERANCE)


def test_the_comparison_sees_a_missing_all_reduce(megatron: Path) -> None:
    """Checks that the comparison fails if each tensor-parallel rank keeps its own part of the norms' gradients."""
    got, want = Result(megatron, "untied-tp2-broken"), Result(megatron, "untied-tp2")
    assert_rows_close(got.logprobs, want.logprobs, 0.0)
    norm, right = got.updates[0]["grad_norm"], want.updates[0]["grad_norm"]
    assert abs(norm / right - 1) > 100 * METRIC_TOLERANCE
    with pytest.raises(AssertionError):
        assert_updates_close(got.updates, want.updates[:1], METRIC_TOLERANCE)


@pytest.mark.parametrize("name", marked(IDENTICAL, LONG))
def test_where_things_are_kept_changes_not_one_bit(megatron: Path, name: str) -> None:
    got, want = Result(megatron, name), Result(megatron, LAYOUTS[name].like)
    assert got.logprobs == want.logprobs
    assert got.updates == want.updates
    assert got.after_logprobs == want.after_logprobs
    assert all(torch.equal(got.after[key], tensor) for key, tensor in want.after.items())


@pytest.mark.parametrize("name", marked([name for name in IDENTICAL if "offload" in name], LONG))
def test_offloaded_tensors_are_away_between_phases(megatron: Path, name: str) -> None:
    layout = LAYOUTS[name]
    keys = {"params": "param_offload", "grads": "grad_offload", "optimizer": "optimizer_offload"}
    away = {group for group, key in keys.items() if layout.megatron.get("auto_offload") or layout.megatron.get(key)}
    moments = Result(megatron, layout.like).bytes_here
    for index, here in enumerate(Result(megatron, name).bytes_here):
        for group, num_bytes in here.items():
            assert num_bytes == (0 if group in away else moments[index][group]), (index, group)
    assert all(num_bytes > 0 for num_bytes in moments[-1].values())


@pytest.mark.parametrize("name", marked(["moe-1-frozen", "moe-ep2-frozen"], LONG))
def test_router_that_is_frozen_keeps_its_weights(megatron: Path, name: str) -> None:
    result = Result(megatron, name)
    for key, tensor in result.before.items():
        assert torch.equal(result.after[key], tensor) == key.endswith("mlp.gate.weight"), key


@pytest.mark.parametrize("name", marked(["untied-1-full", "untied-tp2-full"], LONG))
def test_reference_is_the_model_before_any_update(megatron: Path, name: str) -> None:
    result = Result(megatron, name)
    assert result.reference == result.logprobs


@pytest.mark.parametrize("name", marked(["untied-tp2-full-reference-dp2", "untied-cp2-full-reference-pp2"], LONG))
def test_reference_in_another_layout_is_the_model_before_any_update(megatron: Path, name: str) -> None:
    result = Result(megatron, name)
    assert_rows_close(result.reference, result.logprobs, LOGPROB_TOLERANCE)
    assert_rows_close(result.reference, Result(megatron, "untied-1-full").reference, 1e-6)


@pytest.mark.parametrize("name", marked(["untied-1", "tied-1", "moe-1", "deep-1", "untied-1-unpacked"], LONG))
def test_logprobs_are_those_of_transformers(megatron: Path, trainer_files: Path, name: str) -> None:
    path = trainer_files / "models" / LAYOUTS[name].kind
    assert_rows_close(Result(megatron, name).logprobs, transformers_logprobs(path), LOGPROB_TOLERANCE)


@functools.cache
def transformers_logprobs(model_path: Path) -> list[list[float]]:
    """Returns the log-probabilities of the first batch of the harness, computed one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        return [plain_grpo.score(model, row, TEMPERATURE)[0].tolist() for row in samples().to_pylist()]


@pytest.mark.parametrize("name", ["untied-1", "tied-1", "moe-1", "routed-1", "untied-1-full"])
def test_updates_are_those_of_fsdp(megatron: Path, harness: Harness, name: str) -> None:
    layout, result = LAYOUTS[name], Result(megatron, name)
    harness.open(layout.kind, {"loss": LOSS, **layout.changes})
    batches = [
        with_routed_experts(samples(seed)) if layout.has_routed_experts else samples(seed)
        for seed in range(layout.num_updates)
    ]
    updates = [harness.train(batch, version=seed) for seed, batch in enumerate(batches)]
    assert_updates_close(result.updates, updates, METRIC_TOLERANCE)
    weights = {key: tensor.clone() for key, tensor in harness.backend.weights()}
    assert_weights_close(result.after, weights, WEIGHT_TOLERANCE)
    if layout.changes.get("loss") == FULL_LOSS:
        assert_rows_close(result.reference, harness.logprobs(samples(), role="reference"), LOGPROB_TOLERANCE)


def test_bfloat16_follows_float32(megatron: Path) -> None:
    got, want = Result(megatron, "untied-1-bf16"), Result(megatron, "untied-1-small")
    assert all(tensor.dtype == torch.bfloat16 for tensor in got.after.values())
    # Each rounding of activations is 2^-9 relative, over 2 layers, in logits of size 5; the difference is 0.05 here.
    assert_rows_close(got.logprobs, want.logprobs, 0.2)
    assert [update["loss"] for update in got.updates] == pytest.approx(
        [update["loss"] for update in want.updates], abs=0.02
    )


def test_a_closed_run_leaves_neither_threads_nor_files(megatron: Path) -> None:
    # The process groups of a run bring some 60 threads and 90 files; a leak would add as many with every layout.
    # Layouts with a reference of their own hold more while they are open.
    files = {name: megatron / "world2" / f"{name}-after.json" for name in LAYOUTS if "full" not in name}
    opened = [name for name, file in files.items() if file.exists()]
    answers = [json.loads(files[name].read_text()) for name in opened]
    for key in ("num_threads", "num_files"):
        counts = [answer[key] for answer in answers]
        assert max(counts) - min(counts) < 20, dict(zip(opened, counts, strict=True))
