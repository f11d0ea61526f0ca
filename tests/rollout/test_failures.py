"""Tests what an engine's failure to start is reported as. The log has what vLLM's processes wrote."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from lockstep.types.v1.types_pb2 import ModelCard

from services.common import process as extras
from services.common.config.rollout import RolloutConfig
from services.common.errors import InvalidInput, NotFound, PreconditionFailed, Reason
from services.rollout import engine
from services.rollout.arguments import Needs, check_draft
from services.rollout.engine import Engine
from tests.support import raises

GENERIC = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
OF_WORKERS = "WorkerProc initialization failed due to an exception in a background process. See stack trace for it."
FULL = (
    "ValueError: Free memory on device (7.1/79.1 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.2 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rollout-0.log"
    path.write_text("ValueError: of an engine before\n")
    monkeypatch.setattr(engine, "own_log", lambda: str(path))
    return path


def test_the_cause_is_taken_from_the_log(log: Path) -> None:
    begin = engine.log_size()
    with log.open("a") as file:
        file.write(f"(Worker pid=8) ERROR 11-23 {FULL}\nINFO then\n")
        file.write(f"(EngineCore pid=7) ERROR 11-23 Exception: {OF_WORKERS}\nRuntimeError: {GENERIC}\n")
    error = engine.start_failure(GENERIC, begin)
    assert error.reason is Reason.ENGINE_DEAD
    assert FULL in error.message and "lower rollout.engine.gpu_memory_utilization" in error.message
    assert error.message.endswith(f"its log is {log}")


def test_without_a_cause_the_log_is_named(log: Path) -> None:
    error = engine.start_failure(GENERIC, engine.log_size())
    assert "Engine core initialization failed" in error.message and str(log) in error.message
    assert "gpu_memory_utilization" not in error.message


def test_a_terminal_has_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "own_log", lambda: "")
    assert engine.log_size() == 0
    assert engine.start_failure(GENERIC, 0).message.endswith("Failed core proc(s): {}")


def test_an_engine_that_dies_later_is_explained_too(log: Path) -> None:
    begin = engine.log_size()
    assert engine.cause_of_death(begin) == f"; its log is {log}"  # it was killed, and says nothing
    with log.open("a") as file:
        file.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
        file.write("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n")
    told = engine.cause_of_death(begin)
    assert told.startswith(": OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.; lower rollout.engine.")
    assert told.endswith(f"; its log is {log}")


def test_a_head_that_is_not_there_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    def config(draft: Path) -> RolloutConfig:
        return RolloutConfig.model_validate({"speculation": {"kind": "eagle3", "draft": str(draft)}})

    with raises(InvalidInput, field="rollout.speculation.draft"):
        check_draft(config(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_draft(config(tmp_path))
    check_draft(RolloutConfig())


async def test_the_card_of_no_model_is_refused_before_vllm_starts() -> None:
    """vLLM would make a list of the layers, for minutes and until the memory is full."""
    for files, error in ({}, NotFound), ({"config.json": b'{"num_hidden_layers": 100000000}'}, InvalidInput):
        with raises(error, field="model"):
            await Engine.start(RolloutConfig(), ModelCard(files=files), 0, lambda: None, Needs())


@pytest.mark.parametrize("installed", ["", "0.1.2"])
async def test_suffix_decoding_without_its_package_is_refused_before_vllm_starts(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if not installed:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(extras, "version", version)
    config = RolloutConfig.model_validate({"speculation": {"kind": "suffix"}})
    started = Engine.start(config, ModelCard(), 0, lambda: None, Needs())
    has = f"arctic-inference {installed}" if installed else "no arctic-inference"
    with raises(PreconditionFailed, reason=Reason.UNSUPPORTED_VERSION) as refused:
        await started
    assert f" has {has}; " in refused.value.message
    expected = {"library": "arctic-inference", "installed": installed, "supported": "==0.1.1"}
    assert refused.value.metadata == expected
    monkeypatch.setattr(extras, "version", lambda package: "0.1.1")
    check_draft(config)
