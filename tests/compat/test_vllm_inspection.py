"""Tests how vLLM learns what a model's class supports, on a host that has not run it before."""

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import subprocess, sys, tempfile
from multiprocessing import util
tempfile.tempdir = sys.argv[1]
util.get_temp_dir()
from services.rollout.__main__ import preload
preload()
from services.rollout.compat.client import fork_engines
fork_engines()
from vllm.model_executor.models.registry import _LazyRegisteredModel
subprocess.run = sys.exit  # with which vLLM starts a new interpreter
print(_LazyRegisteredModel("vllm.model_executor.models.glm4", "Glm4ForCausalLM").inspect_model_cls().architecture)
"""


@pytest.mark.slow
def test_a_fork_inspects_a_model_and_not_a_new_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "Glm4ForCausalLM"
