"""Runs with real services and two trainer ranks: streaming changes no bit of what is trained."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.lockstep_command import invoke, make_workspace, numbers, require_legal, weights

NUM_STEPS = 2
# Two groups in a block, if their samples are long; some groups are dropped, and the reference sees the same blocks.
_TRAINER = {"num_ranks": 2, "max_tokens_per_microbatch": 256, "optim": {"lr": 1e-3}, "loss": {"kl_coef": 0.05}}
_SELECTION = {"dynamic": {"enabled": True, "max_rounds": 6}}
# Rewards of 0 and 1, so that there are groups whose rewards are all equal.
_SCORER = """
def score(*, completion, **_):
    return float(sum(c.isdigit() for c in completion) > 0.15 * max(1, len(completion)))
"""


def finished(directory: Path, streaming: str, lent: Sequence[str], **trainer: Any) -> Path:
    directory.mkdir()
    settings: dict[str, Any] = {"num_steps": NUM_STEPS, "selection": _SELECTION, "checkpoint": {"save_freq": 1}}
    settings["model"] = str(directory / "model")
    workspace = make_workspace(directory, trainer={**_TRAINER, "streaming": streaming, **trainer}, **settings)
    (workspace / "gate.py").write_text(_SCORER)
    done = invoke("run", "run.yaml", *lent[:2], cwd=workspace)
    assert done.returncode == 0, done.stdout + done.stderr
    require_legal(workspace / "runs" / "run")
    return workspace


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory, lent: Sequence[str]) -> Path:
    return finished(tmp_path_factory.mktemp("streaming") / "auto", "auto", lent)


def test_the_weights_are_the_same_with_and_without(streamed: Path, tmp_path: Path, lent: Sequence[str]) -> None:
    compare(streamed, finished(tmp_path / "off", "off", lent))


_MEGATRON = {"strategy": "megatron"}
VARIANTS: dict[str, dict[str, Any]] = {
    "Megatron": _MEGATRON,
    "Megatron, tensors cut": {**_MEGATRON, "megatron": {"tensor_model_parallel_size": 2}},
    # Four micro-batches for each stage are less than half of the longest possible batch.
    "Megatron, pipeline": {
        **_MEGATRON,
        "megatron": {"pipeline_model_parallel_size": 2},
        "max_tokens_per_microbatch": 96,
    },
    "several mini-batches": {"num_minibatches": 2},
}


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_so_they_are_with_other_trainers(variant: str, tmp_path: Path, lent: Sequence[str]) -> None:
    compare(*(finished(tmp_path / streaming, streaming, lent, **VARIANTS[variant]) for streaming in ("auto", "off")))


def compare(streamed: Path, whole: Path) -> None:
    """Asserts that two runs have the same weights and numbers, and that only the first has streamed."""
    assert weights(streamed) == weights(whole) != {}
    assert numbers(streamed) == numbers(whole)
    assert sum(line.get("sampling/dropped_zero_variance", 0) for line in numbers(whole)) > 0
    for workspace, is_streamed in ((streamed, True), (whole, False)):
        lines = map(json.loads, (workspace / "runs" / "run" / "metrics.jsonl").read_text().splitlines())
        steps = [line for line in lines if "reward/mean" in line]
        assert list(trains_before_recording(workspace / "runs" / "run")) == [is_streamed] * NUM_STEPS
        assert all(0 <= line["time/idle_trainer_s"] <= line["time/step_s"] for line in steps)
        assert all(0 <= line["time/idle_rollout_s"] <= line["time/step_s"] for line in steps)


def trains_before_recording(run_dir: Path) -> Iterator[bool]:
    """Yields for each step whether its call to train begins before its batch is on disk."""
    (path,) = (run_dir / "history").iterdir()
    num_calls = 0
    for line in map(json.loads, path.read_text().splitlines()):
        num_calls += line.get("call") == "trainer.Train"
        if line.get("kind") == "collected":
            yield num_calls > line["version"]


@pytest.mark.long  # test_distill.py replays a streamed step too
def test_a_streamed_step_is_the_same_when_it_is_replayed_as_a_whole(streamed: Path, lent: Sequence[str]) -> None:
    done = invoke("replay", "runs/run", "--step", NUM_STEPS, "--what", "train", lent[0], cwd=streamed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {NUM_STEPS}: identical to the record" in done.stdout + done.stderr
