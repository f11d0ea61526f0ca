"""`lockstep plan` against real ranks on CPU: the peak of every phase is estimated within 15 %."""

from pathlib import Path

import pytest

from benchmarks.memory import CASES, compare, estimates, make_model, measure


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("memory") / "model")


@pytest.mark.parametrize("name", ["fsdp 1 rank", "megatron TP2"])
def test_estimates_are_near_what_ranks_need(model: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    compared = compare(measure(case, model, tmp_path / "case"), estimates(case, model))
    for phase, (measured, estimated) in compared.items():
        assert estimated == pytest.approx(measured[-1], rel=0.15), (phase, measured, estimated)
    # Without activations and logits the estimate would be far off.
    assert compared["backward"][0][-1] > 1.5 * compared["optimizer"][0][-1]
