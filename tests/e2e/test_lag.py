"""Runs with real services and a lag: one that is killed and resumed ends with the weights of one that is not."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.lockstep_command import LockstepRun, assert_gone, invoke, make_workspace, numbers, require_legal, weights

_TRAINER = {"num_ranks": 2, "max_tokens_per_microbatch": 256, "optim": {"lr": 1e-3}}
_STEPS = 5


def workspace(directory: Path, lag: int, strategy: str) -> Path:
    directory.mkdir()
    trainer = {**_TRAINER, "strategy": strategy, "loss": {"old_logprobs": "engine"}, "lag": {"versions": lag}}
    return make_workspace(directory, trainer=trainer, num_steps=_STEPS, checkpoint={"save_freq": 2})


def sampled_from(directory: Path) -> list[int]:
    files = sorted((directory / "runs" / "run" / "batches").glob("*.parquet"))
    return [version for file in files for version in {*pq.read_table(file)["policy_version"].to_pylist()}]


@pytest.mark.long
@pytest.mark.parametrize(("lag", "strategy"), [(1, "fsdp"), (1, "megatron"), (2, "fsdp")])
def test_a_killed_run_ends_like_one_that_is_not(lag: int, strategy: str, tmp_path: Path) -> None:
    undisturbed, disturbed = (workspace(tmp_path / name, lag, strategy) for name in ("undisturbed", "killed"))
    done = invoke("run", "run.yaml", cwd=undisturbed)
    assert done.returncode == 0, done.stdout + done.stderr
    with LockstepRun(disturbed) as run:
        run.until(lambda: run.has("published", 3) and run.has("saved", 2), "version 3 to be served")
        below = run.below()
        run.process.kill()
        assert_gone(below)
    done = invoke("run", "run.yaml", "resume=must", cwd=disturbed)
    assert done.returncode == 0, done.stdout + done.stderr
    require_legal(disturbed / "runs" / "run")
    assert weights(disturbed) == weights(undisturbed) != {}
    assert numbers(disturbed) == numbers(undisturbed)
    assert sampled_from(disturbed) == sampled_from(undisturbed) == [max(0, n - lag) for n in range(_STEPS)]
    steps = [line for line in numbers(disturbed) if "reward/mean" in line]
    assert [line["lag/versions"] for line in steps] == [min(n, lag) for n in range(_STEPS)]
    # Samples of the same weights agree to rounding; later ones do not.
    assert [line["lag/ess"] > 1 - 1e-6 for line in steps] == [n == 0 for n in range(_STEPS)]
    replayed = invoke("replay", "runs/run", "--step", 4, "--what", "train", cwd=disturbed)
    assert "step 4: identical to the record" in replayed.stdout + replayed.stderr
    report = invoke("report", "runs/run", cwd=disturbed)
    assert report.returncode == 0, report.stderr
    assert "Effective sample size" in (disturbed / "runs" / "run" / "report.html").read_text()
