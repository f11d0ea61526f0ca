"""Tests `lockstep push`: the Hub gets the files of an exported model, and errors are one line."""

import subprocess
import sys
from pathlib import Path

from tests.coordinator.data.fake_hub import hub
from tests.support import ROOT

MODEL = ROOT / "deploy" / "quickstart" / "model"


def push(endpoint: str, home: Path, *arguments: object, token: str = "may-write") -> tuple[int, str]:
    """Pushes in a new process, because the Hub client reads its settings only when it is imported."""
    env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": token, "PATH": "/usr/bin:/bin"}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-m", "services.coordinator", "push", *map(str, arguments)]
    done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_model_is_pushed_and_what_is_in_the_way_is_one_line(tmp_path: Path) -> None:
    pushed: dict[str, bytes] = {}
    with hub({}, pushed) as endpoint:
        code, output = push(endpoint, tmp_path, MODEL, "openai/gsm8k")
        assert (code, output.startswith(f"pushed {endpoint}/openai/gsm8k/commit/")) == (0, True), output
        refused = push(endpoint, tmp_path, MODEL, "openai/gsm8k", token="other")
    assert pushed == {path.name: path.read_bytes() for path in MODEL.iterdir()}
    for (code, output), words in [
        (refused, "INVALID_INPUT: you cannot write openai/gsm8k on the Hugging Face Hub ("),
        (push(endpoint, tmp_path, MODEL, "openai/gsm8k"), "UNREACHABLE: the Hugging Face Hub is unreachable ("),
        (push(endpoint, tmp_path, tmp_path, "openai/gsm8k"), f"NOT_FOUND: {tmp_path} has no config.json"),
    ]:
        assert (code, output.count("\n"), output.startswith(f"lockstep: error: {words}")) == (2, 1, True), output
