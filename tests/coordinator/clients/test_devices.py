"""Tests the assignment of GPUs to started services."""

from pathlib import Path

import pytest

from services.common.errors import InvalidInput
from services.coordinator.clients import gpus as devices
from services.coordinator.clients.gpus import split_gpus, visible_gpus
from tests.coordinator.fake_services import make_config
from tests.support import raises


@pytest.fixture(autouse=True)
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)


@pytest.mark.parametrize(
    ("named", "visible"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,3", ["2", "3"]),
        ("3, GPU-8932f937", ["3", "GPU-8932f937"]),
        ("-1", []),
        ("", []),
    ],
)
def test_visible(named: str | None, visible: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == visible


@pytest.mark.parametrize("named", ["4", "0,4,1", "0,0", "1,-1,2", "gpu0"])
def test_a_gpu_that_is_not_there_is_refused(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    with raises(InvalidInput, field="CUDA_VISIBLE_DEVICES"):
        visible_gpus()


def test_split() -> None:
    config = make_config(trainer={"num_ranks": 2}, rollout={"num_replicas": 2})
    expected = {"trainer": "4,5", "rollout-0": "6", "rollout-1": "7"}
    assert split_gpus({"trainer": 2}, config, available=["4", "5", "6", "7"], start_rollout=True) == expected
    assert split_gpus({"trainer": 2}, config, available=["4", "5"], start_rollout=False) == {"trainer": "4,5"}
    assert split_gpus({"trainer": 2}, config, available=[], start_rollout=True) == {}
    config = make_config(rollout={"engine": {"data_parallel_size": 2, "pipeline_parallel_size": 2}})
    expected = {"trainer": "0", "rollout-0": "1,2,3,4"}
    assert split_gpus({"trainer": 1}, config, available=list("01234"), start_rollout=True) == expected
    with pytest.raises(
        InvalidInput, match=r"num_replicas x tensor_parallel_size x engine\.pipeline_parallel_size x .* need 5"
    ):
        split_gpus({"trainer": 1}, config, available=list("0123"), start_rollout=True)
    with raises(InvalidInput, field="trainer.num_ranks"):
        split_gpus({"trainer": 2}, config, available=["0", "1", "2"], start_rollout=True)


def test_colocated_engines_get_the_trainers_gpus() -> None:
    shared = {"trainer": {"num_ranks": 4}, "placement": "colocated"}
    config = make_config(**shared, rollout={"num_replicas": 2, "tensor_parallel_size": 2})
    expected = {"trainer": "4,5,6,7", "rollout-0": "4,5", "rollout-1": "6,7"}
    available = ["4", "5", "6", "7", "8"]
    assert split_gpus({"trainer": 4}, config, available=available, start_rollout=True) == expected
    assert split_gpus({"trainer": 4}, config, available=[], start_rollout=True) == {}
    with raises(InvalidInput, field="trainer.num_ranks"):
        split_gpus({"trainer": 4}, config, available=available[:3], start_rollout=True)
