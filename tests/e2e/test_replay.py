"""Tests `lockstep replay` with real services: it repeats a step exactly, and names what was changed."""

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from services.common.errors import DataLoss, InvalidInput, NotFound, PreconditionFailed
from services.coordinator.replay.record import Record
from services.coordinator.replay.session import parse_what
from services.coordinator.runs.ledger import Kind, Ledger
from tests.e2e.lockstep_command import NUM_STEPS, invoke
from tests.support import raises


@pytest.fixture
def workspace(undisturbed: Path, tmp_path: Path) -> Path:
    """Provides a copy of the run and of all that it read, except the model, whose path is absolute."""
    return shutil.copytree(undisturbed, tmp_path / "copy")


def replay(workspace: Path, *arguments: object) -> tuple[int, str]:
    done = invoke("replay", "runs/run", *arguments, cwd=workspace)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


def files(directory: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file, except those of replays."""
    paths = [path for path in directory.rglob("*") if path.is_file() and "replay" not in path.parts]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_a_step_is_exactly_the_same_again(workspace: Path, lent: Sequence[str]) -> None:
    before = files(workspace / "runs" / "run")
    code, output = replay(workspace, "--step", 4, lent[0])
    assert code == 0, output
    assert "step 4: identical to the record" in output
    assert "rewards of 32 samples: all equal" in output
    # The replay starts from the checkpoint of step 2, so the batch of step 3 comes first.
    assert "step-000002" in output and "training on the batch of step 3" in output
    assert files(workspace / "runs" / "run") == before
    (directory,) = (workspace / "runs" / "run" / "replay").iterdir()
    assert directory.name.startswith("step-000004-")


def test_a_changed_reward_is_named(workspace: Path) -> None:
    path = workspace / "runs" / "run" / "batches" / "step-000003.parquet"
    table = pq.read_table(path)
    rewards = table["reward"].to_pylist()
    prompt_id, number = table["prompt_id"][5].as_py(), table["sample"][5].as_py()
    was, rewards[5] = rewards[5], rewards[5] + 0.125
    index = table.schema.get_field_index("reward")
    pq.write_table(table.set_column(index, table.schema.field(index), pa.array(rewards)), path)
    code, output = replay(workspace, "--step", 4, "--what", "rewards")
    assert code == 1, output
    assert f"prompt {prompt_id} sample {number}: reward: recorded {rewards[5]!r}, now {was!r}\n" in output
    assert "SHA-256 of step-000003.parquet: recorded " in output
    assert "step 4: 2 differences" in output
    assert not list((workspace / "runs" / "run" / "replay").rglob("trainer.log"))


@pytest.fixture
def changed_weight(undisturbed: Path) -> Iterator[None]:
    """Changes a weight of the model that the run began with, for one test."""
    path = undisturbed / "model" / "model.safetensors"
    weights, content = load_file(path), path.read_bytes()
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, path, metadata={"format": "pt"})
    yield
    path.write_bytes(content)


@pytest.mark.usefixtures("changed_weight")
def test_a_changed_weight_is_named(workspace: Path, lent: Sequence[str]) -> None:
    code, output = replay(workspace, "--step", 1, "--what", "train", lent[0])
    assert code == 1, output
    for what in ("weights of version 0", "weights of version 1", "train/grad_norm"):
        assert f"\n{what}: recorded " in output
    assert "SHA-256" not in output  # the batch is as it was


def test_what_cannot_be_replayed_is_said_before_anything_starts(workspace: Path) -> None:
    run_dir = workspace / "runs" / "run"
    code, output = replay(workspace, "--step", 99)
    assert (code, f"has steps 1 to {NUM_STEPS}" in output) == (2, True), output
    assert not (run_dir / "replay").exists()
    with raises(InvalidInput, field="what"):
        parse_what("weights")

    with closing(Record(run_dir)) as record:
        with raises(InvalidInput, field="step"):
            record.require_step(0)
        assert [record.start(version)[0] for version in (0, 1, 2, 3, 4)] == [0, 0, 2, 2, 4]
        (run_dir / "batches" / "step-000001.parquet").unlink()
        with raises(NotFound, field="step"):
            record.batch(2)
        manifest = run_dir / "checkpoints" / "step-000004" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes() + b" ")
        with pytest.raises(DataLoss, match="not the file that was saved"):
            record.start(4)
    config = json.loads((run_dir / "config.json").read_text())
    with closing(Ledger(run_dir / "ledger.sqlite")) as ledger:  # a session that had nothing to do
        opened = ledger.all(Kind.OPENED)[-1]
        idle = json.dumps(config | {"num_steps": 1})
        ledger.record(Kind.OPENED, opened.pop("version"), **(opened | {"config": idle}))
    Record(run_dir).close()

    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as database, database:
        gone = str(workspace / "gone")
        database.execute("UPDATE decisions SET body = json_set(body, '$.checkpoint', ?) WHERE kind = 'opened'", (gone,))
    with closing(Record(run_dir)) as record, raises(NotFound, field="step"):
        record.start(1)

    config["trainer"]["optim"]["lr"] = 1.0
    (run_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(PreconditionFailed, match=r"changed since the run: trainer\.optim\.lr"):
        Record(run_dir)
