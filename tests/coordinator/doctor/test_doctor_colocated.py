"""Tests `lockstep doctor` for a run in which trainer and engines share GPUs."""

import pytest

from services.coordinator.doctor import Verdict
from services.coordinator.doctor.session import examine_colocated
from services.coordinator.fleet.launch import Addresses
from tests.coordinator.fake_services import make_config

COLOCATED = make_config(placement="colocated")
HERE = Addresses()


def verdicts(given: Addresses = HERE, **environment: str) -> dict[str, Verdict]:
    return {finding.check: finding.verdict for finding in examine_colocated(COLOCATED, given, environment)}


def test_a_run_with_own_gpus_needs_nothing() -> None:
    assert list(examine_colocated(make_config(), Addresses(trainer="a:1"), {})) == []


def test_nothing_is_wrong() -> None:
    assert verdicts() == {"placement": Verdict.OK, "namespaces": Verdict.OK, "allocator": Verdict.OK}
    assert verdicts(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64")["allocator"] is Verdict.OK
    both = Addresses(trainer="gpu:1", rollout=("gpu:2", "gpu:3"))
    assert verdicts(both)["placement"] is Verdict.OK
    assert verdicts(both)["namespaces"] is Verdict.WARN  # they may be in containers


@pytest.mark.parametrize(
    "given",
    [
        Addresses(trainer="gpu:1"),
        Addresses(rollout=("gpu:1",)),
        Addresses(trainer="gpu:1", rollout=("other:1",)),
        Addresses(trainer="gpu:1", rollout=("gpu:2", "other:1")),
    ],
)
def test_services_on_different_hosts(given: Addresses) -> None:
    assert verdicts(given)["placement"] is Verdict.FAIL


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments(name: str) -> None:
    assert verdicts(**{name: "expandable_segments: True"})["allocator"] is Verdict.FAIL
