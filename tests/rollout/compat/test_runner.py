"""Tests for which engines vLLM's V1 model runner is chosen."""

import os
from typing import Any

import pytest
import vllm.envs
from packaging.version import Version

from services.rollout.compat import client
from services.rollout.compat.recorded import returning_masks

MASKS = returning_masks({}, is_gpu=False)
HEAD = {"speculative_config": {"method": "eagle3"}}
VARIABLE, METHOD = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_WORKER_MULTIPROC_METHOD"


@pytest.mark.parametrize(
    ("arguments", "version", "is_gpu", "chosen"),
    [
        (MASKS, "0.26.0", True, "0"),
        (HEAD, "0.26.0", True, "0"),
        ({"speculative_config": {"method": "ngram"}}, "0.26.0", True, None),
        ({"speculative_config": None, "additional_config": {"other": 1}}, "0.26.0", True, None),
        (MASKS | HEAD, "0.32.0", True, None),
        (MASKS | HEAD, "0.26.0", False, None),
    ],
)
@pytest.mark.parametrize("before", [None, "1"])
def test_the_v1_model_runner_is_chosen_where_v2_cannot(
    arguments: dict[str, Any],
    version: str,
    is_gpu: bool,
    chosen: str | None,
    before: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "require_version", lambda _: Version(version))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(vllm.envs.environment_variables, METHOD, lambda: "forkserver")
    if before:
        monkeypatch.setenv(VARIABLE, before)
    with pytest.raises(RuntimeError), client.suitable_model_runner(arguments, is_gpu=is_gpu):
        assert os.environ.get(VARIABLE) == (chosen or before)
        assert (vllm.envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn") == (chosen is not None)  # a fork would not see it
        raise RuntimeError("the engine could not be started")
    assert os.environ.get(VARIABLE) == before
    assert vllm.envs.VLLM_WORKER_MULTIPROC_METHOD == "forkserver"
    assert VARIABLE in vllm.envs.environment_variables
