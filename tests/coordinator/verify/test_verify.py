"""Tests `lockstep verify`: the record of a real run is legal, and whatever is damaged in a copy of it is named."""

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from services.common.errors import DataLoss, NotFound
from services.coordinator.cli.main import app
from services.coordinator.data.order import seed_of
from services.coordinator.verify.samples import _scores_of
from services.coordinator.verify.session import verify
from tests.coordinator.runs.killing import Deadline, Killed, deadline, killed, make_run, surviving_services
from tests.trainer.harness_processes import marked

__all__ = ["deadline"]
OTHERS = ["SendWeights", "CommitWeights", "line 1", "SaveCheckpoint"]
NUM_STEPS = 5  # two steps of prompts repeat: 8 prompts, 2 a step


@pytest_asyncio.fixture(scope="module")
async def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verified")
    config = make_run(directory, NUM_STEPS)
    async with surviving_services() as services:
        await services.run(config)
    return config.run_dir


@pytest.fixture
def run_dir(undisturbed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(undisturbed, tmp_path / "runs" / "run")


def execute(run_dir: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as database, database:
        assert database.execute(sql, values).rowcount > 0


def change_row(run_dir: Path, kind: str, version: int, **changes: object) -> None:
    """Changes fields of the newest row of `kind` and `version`."""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as database:
        sql = "SELECT seq, body FROM decisions WHERE kind = ? AND version = ? ORDER BY seq DESC"
        seq, body = database.execute(sql, (kind, version)).fetchone()
    execute(run_dir, "UPDATE decisions SET body = ? WHERE seq = ?", json.dumps(json.loads(body) | changes), seq)


def change_batch(run_dir: Path, version: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Changes the samples of a batch, and records the new file's hash as a forger would."""
    path = run_dir / "batches" / f"step-{version:06d}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    change_row(run_dir, "collected", version, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_real_run_is_legal_and_verifying_changes_nothing(run_dir: Path):
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    verdict = verify(run_dir)
    assert verdict.violation == ""
    assert verdict.num_samples >= NUM_STEPS * 4
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("event", marked(["Train", "batch recorded", *OTHERS], OTHERS))
async def test_a_run_that_was_killed_and_resumed_is_legal(event: str, deadline: Deadline, tmp_path: Path):
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    async with surviving_services() as services:
        await services.run(make_run(tmp_path / "first", 2))
        num_events = deadline.events.index(event) + 1
        config = make_run(tmp_path / "second", 2)
        deadline.restart(num_events)
        try:
            await services.run(config)
        except BaseException as error:
            if not any(isinstance(one, Killed) for one in killed(error)):
                raise
        assert verify(config.run_dir).violation == ""
        deadline.restart()
        await services.run(config)
    verdict = verify(config.run_dir)
    assert verdict.violation == ""
    assert sum(row.kind == "opened" for row in verdict.rows) == 2


def other_stamp(rows: list[dict[str, Any]]) -> None:
    rows[1]["policy_digest"] = "digest 7"


def other_version(rows: list[dict[str, Any]]) -> None:
    rows[1]["policy_version"] = 1


def other_seed(rows: list[dict[str, Any]]) -> None:
    rows[1]["seed"] += 1


def repeated_sample(rows: list[dict[str, Any]]) -> None:
    rows[1] = rows[0]


def other_prompt(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["group"] == rows[0]["group"]:
            row["prompt_id"] = "99-ffffffff"
            row["seed"] = seed_of(0, 4, row["prompt_id"], row["sample"])


def cut_group(rows: list[dict[str, Any]]) -> None:
    del rows[-1]


def lost_group(rows: list[dict[str, Any]]) -> None:
    rows[:] = [row for row in rows if row["group"] == rows[0]["group"]]


def group_out_of_range(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["group"] += 8


def negative_group(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["group"] -= 8


@pytest.mark.parametrize(
    ("version", "change", "said"),
    [
        (2, cut_group, "has samples [0] of group 1"),
        (2, lost_group, "has 1 groups, but 2 were selected"),
        (2, group_out_of_range, "is in group 8 of 8 prompts"),
        (2, negative_group, "is in group -8 of 8 prompts"),
        (2, other_stamp, "carries version 2 with digest digest 7, not 2 with digest 2"),
        (2, other_version, "carries version 1"),
        (2, other_seed, "has seed"),
        (2, repeated_sample, "is in the batch twice"),
        (4, other_prompt, "where the order of the data has"),
    ],
)
def test_a_wrong_sample_is_named(run_dir: Path, version: int, change: Callable[..., None], said: str):
    change_batch(run_dir, version, change)
    verdict = verify(run_dir)
    assert said in verdict.violation
    assert (verdict.rows[-1].kind, verdict.rows[-1].version) == ("collected", version)


def test_other_rewards_than_the_ledger_has_are_named(run_dir: Path):
    change_batch(run_dir, 2, lambda rows: rows[1].update(reward=rows[1]["reward"] + 0.5))
    verdict = verify(run_dir)
    assert verdict.violation.startswith("reward/mean of the samples in step-000002.parquet is ")
    assert (verdict.rows[-1].kind, verdict.rows[-1].version) == ("finished", 3)


def test_a_forger_of_rewards_and_metrics_contradicts_the_history_and_the_trainer(run_dir: Path):
    batch = run_dir / "batches" / "step-000002.parquet"
    answered = _scores_of(pq.read_table(batch))
    change_batch(run_dir, 2, lambda rows: rows[1].update(reward=rows[1]["reward"] + 0.5))
    forged = pq.read_table(batch)
    change_row(run_dir, "finished", 3, **{"reward/mean": float(forged["reward"].to_numpy().mean())})
    prompt = forged["prompt_id"][1].as_py()
    assert verify(run_dir).violation == f"the scores of prompt {prompt} are not those that were answered"
    for path in (run_dir / "history").iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        calls = {line["n"] for line in lines if "n" in line and prompt in json.dumps(line)}
        for line in lines:
            for answer in line.get("got", ()) if line.get("n") in calls else ():
                if answer.get("scores", [])[: len(answered[prompt])] == [*answered[prompt]]:
                    answer["scores"] = [*_scores_of(forged)[prompt]]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "the trainer has applied other samples as batch" in verify(run_dir).violation


def eval_file(run_dir: Path) -> Path:
    return run_dir / "evaluations" / "test-step-000004.parquet"


def other_rewards(run_dir: Path) -> None:
    table = pq.read_table(eval_file(run_dir))
    rows = [{**row, "reward": row["reward"] - 0.25} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), eval_file(run_dir))
    sha256 = hashlib.sha256(eval_file(run_dir).read_bytes()).hexdigest()
    change_row(run_dir, "eval_samples", 4, sha256=sha256)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: eval_file(run).unlink(), "test-step-000004.parquet, of a row eval_samples of version 4, is miss"),
        (lambda run: flip(eval_file(run)), "test-step-000004.parquet is not the file that was recorded"),
        (other_rewards, "eval/test/reward of the samples in test-step-000004.parquet is "),
    ],
    ids=["deleted", "changed", "other rewards"],
)
def test_an_evaluation_that_is_not_the_recorded_one_is_named(
    run_dir: Path, change: Callable[[Path], object], said: str
):
    change(run_dir)
    assert verify(run_dir).violation.startswith(said)


def test_a_file_that_was_replaced_as_the_last_session_was_killed_is_no_violation(run_dir: Path):
    saved = "SELECT seq FROM decisions WHERE kind = 'saved' AND version = 2"
    execute(run_dir, f"DELETE FROM decisions WHERE seq > ({saved})")
    rewrite_lines(run_dir, lambda lines: [line for line in lines if json.loads(line)["step"] <= 2])
    shutil.rmtree(run_dir / "history")
    begin_session(run_dir, 2)
    insert_again(run_dir, "published", 2)
    flip(run_dir / "batches" / "step-000001.parquet")
    assert "is not the file that was recorded" in verify(run_dir).violation
    flip(run_dir / "batches" / "step-000001.parquet")
    flip(run_dir / "evaluations" / "test-step-000002.parquet")
    assert verify(run_dir).violation == ""


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def saved(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "step-000002" / "manifest.json"


def insert_again(run_dir: Path, kind: str, version: int) -> None:
    """Appends a copy of a row."""
    columns = "time, kind, version, body"
    sql = f"INSERT INTO decisions ({columns}) SELECT {columns} FROM decisions WHERE kind = ? AND version = ?"
    execute(run_dir, sql, kind, version)


def begin_session(run_dir: Path, version: int) -> None:
    """Appends rows of a coordinator that goes on after step `version`."""
    columns = "time, kind, version, body"
    sql = f"INSERT INTO decisions ({columns}) SELECT time, kind, ?, body FROM decisions WHERE kind = ? LIMIT 1"
    execute(run_dir, sql, None, "opened")
    execute(run_dir, sql, version, "begun")


def rewrite_lines(run_dir: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


DAMAGES: dict[str, tuple[Callable[[Path], object], str, tuple[str, int | None]]] = {
    "a changed batch": (
        lambda run: flip(run / "batches" / "step-000001.parquet"),
        "is not the file that was recorded",
        ("collected", 1),
    ),
    "a lost batch": (lambda run: (run / "batches" / "step-000001.parquet").unlink(), "is missing", ("collected", 1)),
    "another publication": (
        lambda run: change_row(run, "published", 3, digest="x", received={}),
        "carries version 3 with digest digest 3, not 3 with x",
        ("evaluated", 3),
    ),
    "a replica with other weights": (
        lambda run: change_row(run, "published", 3, received={"a:1": "x"}),
        "replica a:1 received",
        ("published", 3),
    ),
    "a lost row": (
        lambda run: execute(run, "DELETE FROM decisions WHERE kind = 'published' AND version = 2"),
        "is missing: the next one is row",
        ("finished", 2),
    ),
    "a step twice": (lambda run: insert_again(run, "finished", 5), "step 5 was finished after step 5", ("finished", 5)),
    "a batch twice": (
        lambda run: insert_again(run, "collected", 4),
        "a batch was sampled from version 4 while 5",
        ("collected", 4),
    ),
    "versions that go back": (lambda run: insert_again(run, "published", 2), "was published twice", ("published", 2)),
    "a step without its publication": (
        lambda run: execute(run, "UPDATE decisions SET kind = 'epoch' WHERE kind = 'published' AND version = 3"),
        "its weights were not published",
        ("finished", 3),
    ),
    "a checkpoint before its step": (
        lambda run: execute(run, "UPDATE decisions SET version = 5 WHERE kind = 'saved' AND version = 2"),
        "was saved before that step",
        ("saved", 5),
    ),
    "a changed checkpoint": (lambda run: flip(saved(run)), "is not the file that was saved", ("saved", 2)),
    "a lost checkpoint": (lambda run: saved(run).unlink(), "is missing", ("saved", 2)),
    "a session from nowhere": (
        lambda run: begin_session(run, 3),
        "the session goes on after step 3, but the run has finished step 5",
        ("begun", 3),
    ),
    "a session that begins twice": (lambda run: insert_again(run, "begun", 0), "began before", ("begun", 0)),
    "other data": (
        lambda run: change_row(run, "collected", 3, dataset="x"),
        "the training data is not",
        ("collected", 3),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_record_is_named(run_dir: Path, name: str):
    damage, said, (kind, version) = DAMAGES[name]
    damage(run_dir)
    verdict = verify(run_dir)
    assert said in verdict.violation
    assert (verdict.rows[-1].kind, verdict.rows[-1].version) == (kind, version)


def first_step(lines: list[str]) -> str:
    return next(line for line in lines if "time/step_s" in line)


def changed(line: str) -> str:
    metrics = json.loads(line)
    return json.dumps({**metrics, "time/step_s": metrics["time/step_s"] + 1}) + "\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [changed(first_step(lines))], "is not what the ledger has"),
        (lambda lines: [lines[0].replace("1.0", "0.5", 1), *lines[1:]], "of the evaluation of step 0, is not what"),
        (lambda lines: [*lines, first_step(lines)], "comes after that of step 5"),
    ],
    ids=["changed", "changed evaluation", "repeated"],
)
def test_a_wrong_line_is_named(run_dir: Path, change: Callable[[list[str]], list[str]], said: str):
    rewrite_lines(run_dir, change)
    assert said in verify(run_dir).violation


@pytest.mark.parametrize("text", [b"{\n", b"\xff\xfe\n", b"[1]\n", b"7\n", b'{"step": null}\n'])
def test_a_line_that_cannot_be_read_is_damage_and_no_violation(run_dir: Path, text: bytes):
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(text)
    with pytest.raises(DataLoss, match=r"line \d+ of .*metrics\.jsonl is damaged"):
        verify(run_dir)


def test_the_last_line_of_a_killed_coordinator_may_be_torn(run_dir: Path):
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "rew')
    assert verify(run_dir).violation == ""


def test_lines_may_be_missing(run_dir: Path):
    rewrite_lines(run_dir, lambda lines: lines[3:])
    assert verify(run_dir).violation == ""


def test_a_session_that_goes_on_with_other_weights_is_named(run_dir: Path):
    begin_session(run_dir, NUM_STEPS)
    insert_again(run_dir, "published", NUM_STEPS)
    change_row(run_dir, "published", NUM_STEPS, digest="digest 0", received={})
    verdict = verify(run_dir)
    assert "of digest digest 0, which was never published before: the run had digest 5" in verdict.violation


@pytest.mark.parametrize(("digest", "said"), [("digest 5", ""), ("x", "was published again with x, not digest 5")])
def test_a_colocated_run_may_publish_the_same_weights_again(run_dir: Path, digest: str, said: str):
    execute(
        run_dir,
        "UPDATE decisions SET body = json_set(body, '$.config', replace(body ->> '$.config', "
        '\'"placement":"disaggregated"\', \'"placement":"colocated"\')) WHERE kind = \'opened\'',
    )
    insert_again(run_dir, "published", NUM_STEPS)
    change_row(run_dir, "published", NUM_STEPS, digest=digest, received={})
    assert verify(run_dir).violation.endswith(said) and bool(said) == bool(verify(run_dir).violation)


def test_a_directory_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(NotFound):
        verify(tmp_path)


def test_the_command_prints_the_prefix_and_the_violation(run_dir: Path):
    done = CliRunner().invoke(app, ["verify", str(run_dir)])
    assert (done.exit_code, f"{NUM_STEPS} finished steps" in done.output) == (0, True)
    assert "no violation" in done.output
    change_batch(run_dir, 2, other_stamp)
    done = CliRunner().invoke(app, ["verify", str(run_dir)])
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert "collected 2" in lines[-2]
    assert lines[-1].startswith("violation after ")
    assert "carries version 2 with digest digest 7" in lines[-1]
