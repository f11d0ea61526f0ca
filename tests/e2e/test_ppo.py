"""Tests PPO with real services: the outputs of critic and reference are in the batch, and both resume exactly."""

import json
import re
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from services.common.batches import decode_sampling_masks
from services.common.errors import DataLoss
from services.coordinator.replay.record import Record
from services.coordinator.runs.resume import CRITIC_CHECKPOINTS
from tests.e2e.lockstep_command import LockstepRun, assert_gone, invoke, make_workspace, numbers

KL_COEF = 0.1


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, lent: Sequence[str]) -> Path:
    """Provides the workspace of a run of four steps that was killed after the third and went on from the second.

    `before` has the third step's numbers before the kill. The critic has a trainer of its own, and the reference is on
    the policy's ranks. The replica before the kill is a borrowed one. Sampling is truncated.
    """
    sampling = {"max_tokens": 24, "top_p": 0.9, "top_k": 20}
    samples = {"completions_per_prompt": 4, "max_model_len": 96, "max_samples": 4}
    directory = make_workspace(
        tmp_path_factory.mktemp("ppo"),
        num_steps=4,
        rollout={"num_replicas": 2, **samples, "sampling": sampling},
        advantage={"kind": "gae", "kl": {"coef": KL_COEF}},
        trainer={"num_ranks": 1, "max_tokens_per_microbatch": 1024, "optim": {"lr": 1e-3}},
        critic={"deployment": "own", "num_ranks": 1, "warmup_steps": 1, "optim": {"lr": 1e-2}},
        evaluation={},
        checkpoint={"save_freq": 2, "max_critic_ckpts_to_keep": 2},
        trace=True,
    )
    with LockstepRun(directory, lent[1]) as run:
        run.until(lambda: run.has("finished", 3) and steps(directory)[3:], "the third step")
        assert len(run.services("trainer")) == 2
        below = run.below()
        run.process.kill()
        assert_gone(below)
    (directory / "before").write_text(json.dumps(steps(directory)[3]))
    with LockstepRun(directory, "rollout.num_replicas=1", "resume=must") as run:
        assert run.wait() == 0, run.output
        assert run.ledger("opened")[-1]["checkpoint"].endswith("step-000002")
    return directory


def steps(workspace: Path) -> list[dict[str, float]]:
    """Returns the numbers of each step, at the step's index."""
    lines = [line for line in numbers(workspace) if "train/critic_loss" in line]
    return [{}, *lines]


def flat(rows: list[list[float]]) -> np.ndarray:
    return np.concatenate(rows)


def test_every_token_has_what_the_other_models_say_of_it(workspace: Path):
    batch = pq.read_table(workspace / "runs" / "run" / "batches" / "step-000000.parquet").to_pydict()
    for name in ("values", "ref_logprobs", "advantages", "returns"):
        assert [len(row) for row in batch[name]] == [len(row) for row in batch["tokens"]]
    # The policy is still the reference, which has the trainer's arithmetic, not the engine's.
    np.testing.assert_allclose(flat(batch["ref_logprobs"]), flat(batch["logprobs"]), atol=1e-4)
    assert np.abs(flat(batch["values"])).max() > 0  # one warm-up batch was trained on
    # gamma and lam are 1, and there is no penalty yet: the return of every token is the sample's reward.
    rewards = np.repeat(batch["reward"], [len(row) for row in batch["tokens"]])
    np.testing.assert_allclose(flat(batch["returns"]), rewards, atol=KL_COEF * 1e-4 * 24)
    later = pq.read_table(workspace / "runs" / "run" / "batches" / "step-000002.parquet").to_pydict()
    assert np.abs(flat(later["ref_logprobs"]) - flat(later["logprobs"])).max() > 1e-3


def test_every_token_has_what_it_was_drawn_from(workspace: Path):
    """Tests that each token is in the set of tokens that it was drawn from.

    Policy and reference, which agree with the engine, have normalized over these sets.
    """
    batch = pq.read_table(workspace / "runs" / "run" / "batches" / "step-000000.parquet").to_pydict()
    for tokens, kept in zip(batch["tokens"], batch["sampling_mask"], strict=True):
        counts, sets = decode_sampling_masks(kept, len(tokens))
        assert all(token in own for token, own in zip(tokens, np.split(sets, counts.cumsum()[:-1]), strict=True))
    assert all(1 < line["sampling/kept_tokens_mean"] <= 20 for line in steps(workspace)[1:])


def test_both_models_go_on_from_one_step(workspace: Path):
    run, (_, *lines) = workspace / "runs" / "run", steps(workspace)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[2] == json.loads((workspace / "before").read_text())
    assert all(line["kl/coef"] == KL_COEF and line["train/logprob_diff_max"] < 1e-4 for line in lines)
    assert lines[-1]["train/critic_lr"] == 1e-2
    for directory in ("checkpoints", "critic_checkpoints"):
        assert sorted(path.name for path in (run / directory).iterdir()) == [f"step-{step:06d}" for step in (2, 4)]


def test_the_time_of_all_services_is_in_one_trace(workspace: Path):
    events = json.loads((workspace / "runs" / "run" / "trace.json").read_text())
    processes = {event["pid"]: event["args"]["name"].split()[0] for event in events if event["ph"] == "M"}
    started = ["coordinator", "reward", "trainer", "trainer"]  # by each of the two runs
    assert sorted(processes.values()) == sorted([*started, *started, "rollout"])
    spans: dict[str, set[str]] = {}
    for event in events:
        if event["ph"] == "b":
            spans.setdefault(processes[event["pid"]], set()).add(event["name"])
    assert {"generating", "training", "publishing", "checkpointing"} <= spans["coordinator"]
    assert {"Generate", "ReceiveWeights", "CommitWeights"} <= spans["rollout"]
    assert {"Train", "Forward", "SendWeights", "SaveCheckpoint"} <= spans["trainer"]
    assert "Score" in spans["reward"]


@pytest.mark.long
def test_a_replay_trains_both_models_again_and_names_what_differs(workspace: Path, tmp_path: Path):
    copy = shutil.copytree(workspace, tmp_path / "copy")
    name = "train/critic_grad_norm"
    with closing(sqlite3.connect(copy / "runs" / "run" / "ledger.sqlite")) as database, database:
        changed = database.execute(
            "UPDATE decisions SET body = json_set(body, ?, 0.125) WHERE kind = 'finished' AND version = 3",
            (f'$."{name}"',),
        )
        assert changed.rowcount == 2  # before the kill and after it
    done = invoke("replay", "runs/run", "--step", 4, "--what", "train", cwd=copy)
    assert done.returncode == 1, done.stdout + done.stderr
    was = steps(workspace)[3][name]
    assert f"\nstep 3: {name}: recorded 0.125, now {was!r}\n" in done.stdout
    assert "step 4: 1 difference" in done.stdout
    # Everything else is the same to the last bit: weights and moments of the critic are in its checkpoint of step 4.
    (policy,) = re.findall(r"weights and metrics, (\d+) values: all equal", done.stdout)
    (critic,) = re.findall(r"critic's weights and metrics, (\d+) values: 1 differ", done.stdout)
    num_metrics = sum("train/critic_" in name for name in steps(workspace)[4])
    num_files = len(list((workspace / "runs" / "run" / CRITIC_CHECKPOINTS / "step-000004").rglob("*.distcp")))
    assert int(policy) > 10 and num_files > 0 and int(critic) == 2 * num_metrics + num_files


def test_where_a_critic_can_begin_again(workspace: Path, tmp_path: Path):
    run = shutil.copytree(workspace / "runs" / "run", tmp_path / "run")
    with closing(Record(run)) as record:
        checkpoint = str(run / "critic_checkpoints" / "step-000002")
        assert record.critic_start(3) == record.critic_start(2) == (2, checkpoint)
        assert record.critic_start(1) is None  # the batch that it was warmed up with is not kept
        assert [record.critic_checkpoint(step) for step in (1, 2, 3)] == [None, Path(checkpoint), None]
        (Path(checkpoint) / "manifest.json").write_text("{}")
        with pytest.raises(DataLoss, match="not the file that was saved"):
            record.critic_start(3)
