"""Tests runs with a teacher and real services: blocks, a kill and a replay change no bit of what is distilled."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from services.common.batches import decode_top_k
from tests.e2e.lockstep_command import LockstepRun, invoke, make_workspace, numbers, require_legal, weights
from tests.support import make_model

NUM_STEPS = 2
TOP_K = 8


def make(directory: Path, **changes: Any) -> Path:
    """Fills `directory` with a run that distills a model of other weights, without a scorer, in blocks of two groups.

    The teacher is on the policy's ranks. Its sampled tokens are advantages, and its most probable ones are in the loss.
    """
    directory.mkdir()
    loss = {"distill": {"coef": 0.3, "top_k": TOP_K}}
    trainer = {"num_ranks": 2, "max_tokens_per_microbatch": 256, "optim": {"lr": 1e-3}, "loss": loss}
    settings: dict[str, Any] = {
        "num_steps": NUM_STEPS,
        "model": str(directory / "model"),
        "teacher": {"model": str(make_model(directory / "teacher", "tied"))},
        "advantage": {"kind": "distill", "distill_coef": 0.5},
        "reward": {},
        "evaluation": {},
        "checkpoint": {"save_freq": 1},
        "trainer": trainer | changes.pop("trainer", {}),
        **changes,
    }
    return make_workspace(directory, **settings)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory, lent: Sequence[str]) -> Path:
    """Provides the workspace of a run that was killed after its second batch was recorded, and went on."""
    workspace = make(tmp_path_factory.mktemp("distill") / "streamed")
    with LockstepRun(workspace, *lent[:2]) as run:
        run.until(lambda: run.has("collected", 1), "the second batch")
        run.process.kill()
    with LockstepRun(workspace, *lent[:2], "resume=must") as run:
        assert run.wait() == 0, run.output
    return workspace


def flat(batch: dict[str, list[list[float]]], name: str) -> np.ndarray:
    return np.concatenate(batch[name])


def test_the_advantages_are_those_of_the_teacher(streamed: Path) -> None:
    for step in range(NUM_STEPS):
        path = streamed / "runs" / "run" / "batches" / f"step-{step:06d}.parquet"
        batch = pq.read_table(path).to_pydict()
        toward = flat(batch, "teacher_logprobs").astype(np.float64) - flat(batch, "logprobs")
        np.testing.assert_allclose(flat(batch, "advantages"), 0.5 * toward, atol=1e-6)
        line = [line for line in numbers(streamed) if "train/loss" in line][step]
        assert line["teacher_kl/token_mean"] == pytest.approx(-toward.mean(), rel=1e-6)
        assert set(batch["reward"]) == {0.0}
        require_most_probable(batch)
        assert line["train/distill_kl"] > 0


def require_most_probable(batch: dict[str, list[Any]]) -> None:
    """Requires that the most probable tokens have the log-probabilities of the sampled ones, wherever these are among
    them, and are never less probable."""
    for data, tokens, logprobs in zip(batch["teacher_top_k"], batch["tokens"], batch["teacher_logprobs"], strict=True):
        for place, (top, top_logprobs) in enumerate(zip(*decode_top_k(data, len(tokens)), strict=True)):
            assert len(top) == TOP_K and (np.diff(top_logprobs[:-1]) <= 0).all()
            assert np.exp(top_logprobs).sum() == pytest.approx(1, abs=1e-5)
            if len(same := top_logprobs[:-1][top == tokens[place]]):
                assert same[0] == pytest.approx(logprobs[place], abs=1e-6)
            else:
                assert logprobs[place] <= top_logprobs[-2]


@pytest.mark.long  # the replay below trains on a whole batch, too, and other killed runs are compared
def test_a_killed_run_is_equal_to_one_that_was_not_streamed(
    streamed: Path, tmp_path: Path, lent: Sequence[str]
) -> None:
    workspace = make(tmp_path / "whole", trainer={"streaming": "off"})
    done = invoke("run", "run.yaml", *lent[:2], cwd=workspace)
    assert done.returncode == 0, done.stdout + done.stderr
    require_legal(workspace / "runs" / "run")
    assert weights(streamed) == weights(workspace) != {}
    assert numbers(streamed) == numbers(workspace)


def test_it_is_the_same_when_it_is_replayed(streamed: Path, lent: Sequence[str]) -> None:
    done = invoke("replay", "runs/run", "--step", NUM_STEPS, "--what", "train", lent[0], cwd=streamed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {NUM_STEPS}: identical to the record" in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"lag": {"versions": 1}, "loss": {"old_logprobs": "engine"}}},
        {"advantage": {"kind": "grpo", "distill_coef": 0.5}, "reward": {"scorers": [{"kind": "exact"}]}},
        {"trainer": {"strategy": "megatron"}},
    ],
    ids=["a lag", "beside a reward", "Megatron"],
)
def test_other_runs_with_a_teacher_are_repeatable(changes: dict, tmp_path: Path, lent: Sequence[str]) -> None:
    found = []
    for name in ("one", "two"):
        workspace = make(tmp_path / name, **json.loads(json.dumps(changes)))
        done = invoke("run", "run.yaml", *lent[:2], cwd=workspace)
        assert done.returncode == 0, done.stdout + done.stderr
        require_legal(workspace / "runs" / "run")
        found.append((weights(workspace), numbers(workspace)))
    assert found[0] == found[1]


def test_a_teacher_with_other_tokens_is_refused_when_the_run_opens(tmp_path: Path, lent: Sequence[str]) -> None:
    workspace = make(tmp_path / "other")
    path = workspace / "teacher" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second, *_ = (text for text, _ in sorted(vocab.items(), key=lambda one: -one[1]))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content))
    done = invoke("run", "run.yaml", *lent[:2], cwd=workspace)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "teacher.model: its tokenizer is not the policy's" in " ".join(output.split())
