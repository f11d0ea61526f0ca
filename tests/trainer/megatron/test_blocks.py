"""Batches in blocks on real ranks of both backends.

What a stream leaves is what the same blocks leave at once, and the whole batch.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support import make_model
from tests.trainer.fsdp_harness import read
from tests.trainer.harness_processes import run_harness
from tests.trainer.megatron_blocks_harness import LAYOUTS, LONG, MODES

# As in test_backend.py and test_lora.py: float32 sums in another order, two updates deep, relative to a tensor's
# largest entry. Rounding of weights to bfloat16, which has 8 bits, is that of 1 in 2^8, of updates of up to 3e-2.
TOLERANCE, ADAPTER_TOLERANCE, BFLOAT16_TOLERANCE = 1e-5, 5e-5, 2e-2
METRIC_TOLERANCE = 1e-5


NAMES = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in LAYOUTS]
OVERLAPPING = [param for param, name in zip(NAMES, LAYOUTS, strict=True) if name.endswith("-overlap")]
WAITING = "untied-dp2-auto_offload"  # the same update, whose gradients are reduced at its end


@pytest.fixture(scope="session")
def short_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_layouts(tmp_path_factory, [name for name in LAYOUTS if name not in LONG])


@pytest.fixture(scope="session")
def long_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_layouts(tmp_path_factory, [*LONG])


@pytest.fixture
def results(request: pytest.FixtureRequest, name: str) -> Path:
    return request.getfixturevalue("long_results" if name in LONG else "short_results")


def run_layouts(factory: pytest.TempPathFactory, names: Sequence[str]) -> Path:
    directory = factory.mktemp("blocks")
    for kind in {LAYOUTS[name].kind for name in names}:
        make_model(directory / "models" / kind, kind)
    out = directory / "out"
    out.mkdir()
    run_harness("megatron_blocks_harness", out, out, names)
    return out


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], *, is_bfloat16: bool = False) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        gap = (got[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp_min(1e-12)
        tolerance = ADAPTER_TOLERANCE if name.startswith("adapter/") else TOLERANCE
        assert gap <= (BFLOAT16_TOLERANCE if is_bfloat16 else tolerance), f"{name}: {gap:.3g}"


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_ends_with_the_same_bits_as_its_blocks_at_once(results: Path, name: str) -> None:
    (streamed, metrics), (at_once, theirs) = read(results, f"{name}-on"), read(results, f"{name}-off")
    assert metrics == theirs
    assert streamed.keys() == at_once.keys()
    assert [key for key, tensor in at_once.items() if not torch.equal(streamed[key], tensor)] == []


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_the_update_of_the_whole_batch(results: Path, name: str) -> None:
    (blocks, metrics), (whole, theirs) = read(results, f"{name}-off"), read(results, f"{name}-whole")
    is_bfloat16 = "bf16" in name
    for ours, want in zip(metrics["updates"], theirs["updates"], strict=True):
        tolerance = BFLOAT16_TOLERANCE if is_bfloat16 else METRIC_TOLERANCE
        assert ours == pytest.approx(want, rel=tolerance, abs=tolerance)
    assert_close(blocks, whole, is_bfloat16=is_bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_megatrons_output_layer_adds_to_the_sum_itself(results: Path, name: str) -> None:
    """It does so unless it is tied, frozen (with LoRA), or on another pipeline stage than rank 0, which looks."""
    layout = LAYOUTS[name]
    has_other = layout.kind == "tied" or "pipeline_model_parallel_size" in layout.megatron
    want = not (has_other or "lora" in layout.changes or layout.changes.get("strategy") == "fsdp")
    assert [read(results, f"{name}-{mode}")[1]["adds_output"] for mode in MODES] == [want] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["untied-dp2-one_bucket-overlap"])
def test_gradients_that_are_reduced_in_the_background_are_the_same_bits(results: Path, name: str, mode: str) -> None:
    """Overlap is the default on GPUs. More buckets than one would round the gradients' norm differently."""
    (overlapping, metrics), (waiting, theirs) = (read(results, f"{each}-{mode}") for each in (name, WAITING))
    assert metrics == theirs
    assert [key for key, tensor in waiting.items() if not torch.equal(overlapping[key], tensor)] == []


@pytest.mark.parametrize("name", OVERLAPPING)
def test_blocks_and_whole_batches_may_alternate(results: Path, name: str) -> None:
    assert_close(read(results, f"{name}-mixed")[0], read(results, f"{name}-whole")[0])
