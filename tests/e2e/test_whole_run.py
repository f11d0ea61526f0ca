"""Tests a run from end to end with services given by address: its files, and that all numbers are consistent."""

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from tests.common.telemetry.watched import parse, value
from tests.e2e.lockstep_command import NUM_STEPS, numbers


@pytest.fixture(scope="module")
def workspace(undisturbed: Path) -> Path:
    return undisturbed


def ledger(workspace: Path) -> list[tuple[str, int, dict]]:
    with closing(sqlite3.connect(workspace / "runs" / "run" / "ledger.sqlite")) as database:
        rows = database.execute("SELECT kind, version, body FROM decisions ORDER BY seq")
        return [(kind, version, json.loads(body)) for kind, version, body in rows]


def test_every_step_is_on_policy_and_recorded_once(workspace: Path):
    rows = ledger(workspace)
    published = {version: body["digest"] for kind, version, body in rows if kind == "published"}
    assert sorted(published) == list(range(NUM_STEPS + 1))
    assert len(set(published.values())) == NUM_STEPS + 1
    assert [version for kind, version, _ in rows if kind == "finished"] == list(range(1, NUM_STEPS + 1))
    assert [body["num_replicas"] for kind, _, body in rows if kind == "epoch"] == [2]
    for kind, version, body in rows:
        if kind != "collected":
            continue
        path = workspace / "runs" / "run" / "batches" / f"step-{version:06d}.parquet"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == body["sha256"]
        table = pq.read_table(path)
        assert set(table["policy_version"].to_pylist()) == {version}
        assert set(table["policy_digest"].to_pylist()) == {published[version]}
        assert len(set(zip(table["prompt_id"].to_pylist(), table["sample"].to_pylist(), strict=True))) == 8 * 4
        assert len(set(table["seed"].to_pylist())) == 8 * 4
        for tokens, logprobs in zip(table["tokens"].to_pylist(), table["logprobs"].to_pylist(), strict=True):
            assert 0 < len(tokens) == len(logprobs)


def test_no_service_ends_a_run_or_itself_with_a_traceback(workspace: Path):
    """Checks the logs of the run; the fixture `lent_services` checks how the shared services end later."""
    logs = {name: (workspace / f"{name}.log").read_text() for name in ("trainer", "reward", "rollout-0", "rollout-1")}
    assert "listens on" in logs["reward"]
    assert [name for name, log in logs.items() if "Traceback" in log] == []


def test_numbers_of_every_step(workspace: Path):
    lines = numbers(workspace)
    steps = [line for line in lines if "reward/mean" in line]
    evaluations = [line for line in lines if "eval/test/reward" in line]
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
    assert [line["step"] for line in evaluations] == [0, 2, 4]
    # Engine and trainer compute in float32, as in tests/rollout.
    assert max(line["train/logprob_diff_max"] for line in steps) <= 1e-4
    for line in steps:
        batch = pq.read_table(workspace / "runs" / "run" / "batches" / f"step-{line['step'] - 1:06d}.parquet")
        assert line["reward/mean"] == pytest.approx(np.mean(batch["reward"].to_numpy()), abs=1e-12)
        assert line["batch/tokens"] == sum(len(tokens) for tokens in batch["tokens"].to_pylist())


def test_prometheus_reads_the_same_of_the_services(workspace: Path):
    """Checks how far each metric rose during the run, because other runs may have used these services before."""
    before, after = (
        {name: parse((workspace / f"{name}.{when}.prom").read_text()) for name in ("trainer", "rollout-0", "rollout-1")}
        for when in ("before", "after")
    )

    def gained(service: str, name: str, **labels: str) -> float:
        earlier = before[service].get(name, {}).get(frozenset(labels.items()), 0.0)
        return value(after[service], name, **labels) - earlier

    replicas = ("rollout-0", "rollout-1")
    batches = [
        pq.read_table(workspace / "runs" / "run" / "batches" / f"step-{step:06d}.parquet") for step in range(NUM_STEPS)
    ]
    for part, column in (("prompt", "prompt_tokens"), ("completion", "tokens")):
        num_tokens = sum(len(tokens) for batch in batches for tokens in batch[column].to_pylist())
        assert gained("trainer", "lockstep_trainer_trained_tokens_total", role="policy", part=part) == num_tokens
    generated = sum(gained(replica, "lockstep_rollout_generated_tokens_total") for replica in replicas)
    assert generated > num_tokens  # evaluations generate tokens too
    # vLLM's own metrics are there although nothing in the config asks for them.
    assert all(
        {"vllm:kv_cache_usage_perc", "vllm:num_requests_running"} <= after[replica].keys() for replica in replicas
    )
    assert gained("trainer", "lockstep_trainer_phase_seconds_count", phase="apply_batch", role="policy") == NUM_STEPS
    assert gained("trainer", "lockstep_rpc_finished_total", method="Train", code="OK") == NUM_STEPS
    sent = gained("trainer", "lockstep_trainer_publication_bytes_total")
    for replica in replicas:
        assert gained(replica, "lockstep_rollout_publication_bytes_total") == sent > 0
        assert gained(replica, "lockstep_rollout_publication_seconds_count") == NUM_STEPS + 1
        assert value(after[replica], "lockstep_rollout_in_flight_samples") == 0
    # The run has ended, and the services that it was given no longer hold it.
    assert "lockstep_trainer_version" not in after["trainer"]
    assert not any("lockstep_rollout_served_info" in after[replica] for replica in replicas)


def test_the_newest_checkpoints_and_the_model_are_kept(workspace: Path):
    directory = workspace / "runs" / "run"
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    trained = AutoModelForCausalLM.from_pretrained(directory / "model")
    before = AutoModelForCausalLM.from_pretrained(workspace / "model")
    changed = [not a.equal(b) for a, b in zip(trained.parameters(), before.parameters(), strict=True)]
    assert all(changed)
    assert sorted(path.name for path in (directory / "evaluations").iterdir()) == [
        f"test-step-{version:06d}.parquet" for version in (0, 2, 4)
    ]
