"""Tests doctor's checks of the driver and of the GPUs' memory."""

import json
from pathlib import Path

import pytest

from services.common.config.run import Config
from services.common.errors import PreconditionFailed
from services.common.process import require_extra
from services.coordinator.clients.gpus import Gpu
from services.coordinator.doctor import Finding, Verdict
from services.coordinator.doctor import host as doctor
from services.coordinator.fleet.launch import Addresses
from services.coordinator.planning import activations
from services.coordinator.planning.memory import colocated_phases, rank_memory
from services.coordinator.planning.plan import planned_model
from tests.coordinator.fake_services import make_config

GIB = 1 << 30
# Qwen2.5-1.5B: `lockstep plan --device gpu` says 56.8 GiB to train without recomputation, 9.6 to publish.
SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return make_config(placement="colocated", model=str(tmp_path))


def gpu(total: float, free: float) -> Gpu:
    return Gpu("0", "GPU-1", int(total * GIB), int(free * GIB))


@pytest.mark.parametrize(
    ("driver", "cuda", "verdict"),
    [
        ("580.65.06", "13.0", Verdict.OK),
        ("575.57.08", "13.0", Verdict.FAIL),
        ("525.60.13", "12.8", Verdict.OK),
        ("470.1", "12.8", Verdict.FAIL),
        ("470.1", None, Verdict.OK),  # torch is not installed here, or check_torch complains
        ("", "13.0", Verdict.FAIL),
    ],
)
def test_driver(driver: str, cuda: str | None, verdict: Verdict) -> None:
    assert doctor.check_driver(driver, cuda).verdict is verdict


def test_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gcc nor clang" in failed(doctor.check_compiler(tmp_path))
    clang = tmp_path / "clang"
    clang.touch(mode=0o755)
    assert "no " + str(tmp_path / "Python.h") in failed(doctor.check_compiler(tmp_path))
    assert "(python3.14-dev)" in doctor.check_compiler(tmp_path / "python3.14").fix
    (tmp_path / "Python.h").touch()
    assert (doctor.check_compiler(tmp_path).verdict, doctor.check_compiler(tmp_path).result) == (Verdict.OK, str(clang))
    monkeypatch.setenv("CC", "icc")
    assert "CC=icc not found" in failed(doctor.check_compiler(tmp_path))


def test_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    finding = doctor.check_compiled_code(tmp_path, 0)
    assert failed(finding) == "cannot be kept" and "set XDG_CACHE_HOME" in finding.fix
    with pytest.raises(PreconditionFailed, match="set XDG_CACHE_HOME"):
        require_extra("trainer")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (tmp_path / "file").unlink()
    assert doctor.check_compiled_code(tmp_path, 1).result.startswith(f"none in {tmp_path}")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "graph").touch()
    assert doctor.check_compiled_code(tmp_path, 1).result == f"of earlier starts, in {tmp_path}"


def failed(finding: Finding) -> str:
    assert finding.verdict is Verdict.FAIL
    return finding.result


def test_memory_of_another_family(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that a model whose needs cannot be counted here gives only a warning: the host may be fit for it."""
    monkeypatch.setattr(activations, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "read_gpus", list)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "cohere2"}))
    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["0"])
    *_, memory = doctor.examine_gpus(config, Addresses(), "580.65.06", "13.0")
    assert (memory.check, memory.verdict) == ("GPU memory", Verdict.WARN)


def test_memory(config: Config) -> None:
    found = doctor.check_memory(config, [gpu(79, 78), gpu(79, 70)])
    assert found.verdict is Verdict.OK
    assert found.result.startswith("GPU 0 has 70.0 GiB free of 79.0 GiB; 63.2 GiB are needed for an engine")
    found = doctor.check_memory(config, [gpu(79, 60)])
    assert found.verdict is Verdict.FAIL and "63.2 GiB are needed for an engine" in found.result
    found = doctor.check_memory(config, [gpu(22, 22)])
    assert found.verdict is Verdict.FAIL and "56.8 GiB are needed to train" in found.result
    assert "--suggest" in found.fix


def test_memory_of_an_engine_that_stays_awake_beside_the_trainer(config: Config) -> None:
    engine = {"enable_sleep_mode": False, "gpu_memory_utilization": 0.2}
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
    found = doctor.check_memory(config, [gpu(79, 78)])
    assert found.verdict is Verdict.OK and "72.6 GiB are needed for trainer and engine" in found.result  # 15.8 + 56.8
    generate, train, publish = colocated_phases(
        config, model := planned_model(config), rank_memory(config, model, is_gpu=True).values()
    )
    assert train.engine == generate.engine == publish.engine > 0
    assert train.trainer > publish.trainer > generate.trainer > 0


def test_a_host_without_gpus_and_a_driver_that_says_nothing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(doctor.examine_gpus(config, Addresses(), "", None)) == []
    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["0"])
    monkeypatch.setenv("PATH", "")
    driver, compiler, memory = doctor.examine_gpus(config, Addresses(), "580.1", "13.0")
    assert (driver.verdict, compiler.verdict) == (Verdict.OK, Verdict.FAIL)
    assert memory.verdict is Verdict.FAIL and "nvidia-smi not found" in memory.fix
    others = doctor.examine_gpus(None, Addresses(), "580.1", "13.0")
    assert [finding.check for finding in others] == ["driver", "compiler"]
