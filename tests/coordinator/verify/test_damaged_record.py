"""Tests that `verify`, `report` and `replay` name what is damaged in a run's directory instead of failing on it."""

import json
import math
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from rich.console import Console

from services.common.errors import DataLoss, LockstepError
from services.coordinator.cli.main import main
from services.coordinator.daemon.history import read_events, read_run
from services.coordinator.observe.report.page import gather
from services.coordinator.observe.report.summary import show_comparison
from services.coordinator.replay.record import Record
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.reader import LedgerReader
from services.coordinator.runs.record import sha256_of
from services.coordinator.verify.history import History
from services.coordinator.verify.session import show_verdict, verify
from tests.coordinator.runs.killing import make_run, surviving_services
from tests.trainer.harness_processes import marked

NUM_STEPS = 2


@pytest_asyncio.fixture(scope="module")
async def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_run(tmp_path_factory.mktemp("damaged"), NUM_STEPS)
    async with surviving_services() as services:
        await services.run(config)
    return config.run_dir


@pytest.fixture
def run_dir(undisturbed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(undisturbed, tmp_path / "run"))


def replay(run_dir: Path) -> None:
    """Reads everything that `lockstep replay` reads before it starts a service."""
    with closing(Record(run_dir)) as record:
        for step in range(1, NUM_STEPS + 1):
            record.require_step(step)
            for read in (record.batch, record.metrics, record.digest):
                read(step)
            record.start(step - 1)


def test_a_checkpoint_that_is_deleted_while_verify_reads_is_no_violation(run_dir: Path) -> None:
    with closing(LedgerReader(run_dir)) as ledger:
        rows = ledger.rows()
        history = History(run_dir, rows, ledger)
        assert any(row.kind == Kind.SAVED for row in rows)
        for manifest in run_dir.glob("checkpoints/*/manifest.json"):
            manifest.unlink()
        for row in rows:
            history.follow(row)
    assert verify(run_dir).violation.endswith("manifest.json of a recorded checkpoint is missing")


def try_all(run_dir: Path) -> list[str]:
    """Runs all three. Returns what each of them said: a violation, the text of a typed error, or nothing."""
    said: list[str] = []
    for read in (lambda: verify(run_dir).violation, lambda: gather(run_dir) and "", lambda: replay(run_dir) or ""):
        try:
            said.append(read())
        except LockstepError as error:
            said.append(error.message)
    return said


def test_of_a_run_as_it_is_nothing_is_said(run_dir: Path) -> None:
    assert try_all(run_dir) == ["", "", ""]


CHANGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00\n{}\n[1]\nnull\n"),
    "other JSON": lambda path: path.write_bytes(b"[1]\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", marked(CHANGES, long=["empty", "other JSON"]))
def test_a_damaged_file_is_named(undisturbed: Path, tmp_path: Path, change: str) -> None:
    for number, file in enumerate(sorted(path for path in undisturbed.rglob("*") if path.is_file())):
        copy = Path(shutil.copytree(undisturbed, tmp_path / str(number)))
        CHANGES[change](copy / file.relative_to(undisturbed))
        said = try_all(copy)
        if file.parent.name in ("batches", "evaluations", "checkpoints") or file.suffix == ".sqlite":
            assert file.name in said[0], said


def bodies(recorded: dict[str, Any]) -> Iterator[object]:
    yield from ("", "x", "[]", "null", "{}", '{"a": 1}', b"\xff\x00")
    for name in [*recorded][:4]:
        yield json.dumps({other: value for other, value in recorded.items() if other != name})
        yield from (json.dumps({**recorded, name: wrong}) for wrong in (None, "x", ["x"]))


def damaged(run_dir: Path, column: str, seq: int, value: object) -> list[str]:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite", isolation_level=None)) as database:
        (before,) = database.execute(f"SELECT {column} FROM decisions WHERE seq = ?", (seq,)).fetchone()
        database.execute(f"UPDATE decisions SET {column} = ? WHERE seq = ?", (value, seq))
        said = try_all(run_dir)
        database.execute(f"UPDATE decisions SET {column} = ? WHERE seq = ?", (before, seq))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_damaged_row_of_any_kind_is_named(run_dir: Path, every: int) -> None:
    """Damages a row of each kind in all ways, or in every fifth, which are others for each kind."""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as database:
        rows = database.execute("SELECT MIN(seq), kind, body FROM decisions GROUP BY kind").fetchall()
    assert {"opened", "begun", "published", "collected", "finished", "eval_samples", "evaluated", "saved"} <= {
        kind for _, kind, _ in rows
    }
    others = [("version", None), ("version", "x"), ("version", -1), ("kind", "x"), ("time", "x")]
    ways = [
        (seq, kind, column, value)
        for seq, kind, body in rows
        for column, value in [*(("body", value) for value in bodies(json.loads(body))), *others]
    ]
    for seq, kind, column, value in ways[::every]:
        said = damaged(run_dir, column, seq, value)
        if column == "body" and value in ("", "x", "[]", "null", b"\xff\x00"):
            assert f"row {seq} of the ledger, {kind}, is damaged" in said[0], (kind, value, said)


def change_row(run_dir: Path, kind: str, change: Callable[[dict[str, Any]], object]) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as database, database:
        sql = "SELECT seq, body FROM decisions WHERE kind = ? ORDER BY seq DESC"
        seq, body = database.execute(sql, (kind,)).fetchone()
        change(changed := json.loads(body))
        database.execute("UPDATE decisions SET body = ? WHERE seq = ?", (json.dumps(changed), seq))


def set_everywhere(run_dir: Path, column: str, value: float) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as database, database:
        database.execute(f"UPDATE decisions SET {column} = ?", (value,))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda run: change_row(run, "published", lambda body: body.pop("digest")), 2),
        (lambda run: (run / "metrics.jsonl").write_bytes(b"\xe9\n"), 2),
        (lambda run: (run / "ledger.sqlite").write_bytes(b""), 2),
        (lambda run: change_row(run, "published", lambda body: body.update(digest="x")), 1),
    ],
    ids=["a field", "metrics.jsonl", "no rows", "a violation"],
)
def test_the_exit_code_tells_damage_from_a_violation(
    run_dir: Path, damage: Callable[[Path], object], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(run_dir)
    monkeypatch.setattr("sys.argv", ["lockstep", "verify", str(run_dir)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code


LINES = ["[" * 100_000, '{"step": 1e999}', '{"step": NaN}', '{"step": -1}', '{"step": 1.5}', '{"step": true}', "{}"]
LINES += [f'{{"step": {10**30}}}', '{"step": 2, "a": null}', '{"step": 2, "a": "1"}', f'{{"step": 2, "a": {10**400}}}']


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:20])
def test_a_line_of_metrics_that_nobody_wrote_is_named(run_dir: Path, line: str) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text(text := f"{path.read_text()}{line}\n")
    why = f"line {text.count(chr(10))} of {path} is damaged"
    assert why in try_all(run_dir)[0]
    assert f"Line {text.count(chr(10))} of metrics.jsonl is damaged" in str(gather(run_dir)["notes"])
    assert (run := read_run(run_dir)) is not None and why in run.error
    with pytest.raises(DataLoss, match="is damaged"):
        read_events(run_dir)


def test_a_whole_number_is_the_same_in_both_records(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    lines = list(map(json.loads, path.read_text().splitlines()))
    newest = max((line for line in lines if "time/step_s" in line), key=lambda line: line["step"])
    newest["own/number"] = 3
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    change_row(run_dir, "finished", lambda body: body.update({"own/number": 3}))
    assert verify(run_dir).violation == ""


def in_config(**values: object) -> Callable[[Path], object]:
    def change(body: dict[str, Any]) -> None:
        body["config"] = json.dumps({**json.loads(body["config"]), **values})

    return lambda run_dir: change_row(run_dir, "opened", change)


@pytest.mark.parametrize(
    "damage",
    [
        *(in_config(num_steps=steps) for steps in ("x", None, -1, 10**30, 1.5)),
        lambda run: change_row(run, "opened", lambda body: body.update(run_id="\ud800")),
        lambda run: change_row(run, "opened", lambda body: body.update(config="{}")),
        lambda run: change_row(run, "finished", lambda body: body.update({"sampling/dropped_x": math.inf})),
        lambda run: (run / "logs").mkdir() or (run / "logs" / "a.log").write_text('{"a":' * 100_000),
        lambda run: (run / "config.json").write_text("[" * 100_000),
        *(
            partial(set_everywhere, column=column, value=value)
            for column, value in (("time", 1e300), ("time", -1e15), ("version", -1))
        ),
    ],
)
def test_every_command_that_reads_a_run_ends_with_a_typed_error(
    run_dir: Path, damage: Callable[[Path], object]
) -> None:
    damage(run_dir)
    try_all(run_dir)
    run = read_run(run_dir)
    assert run is None or run.run_id or run.error
    with suppress(LockstepError):
        show_comparison([run_dir, run_dir], Console())


@pytest.mark.parametrize("folder", ["batches", "evaluations"])
def test_a_file_without_the_columns_of_samples_is_named(run_dir: Path, folder: str) -> None:
    path = max((run_dir / folder).glob("*.parquet"))
    samples = pq.read_table(path)
    others = (samples.drop_columns("group"), samples.append_column("reward", samples["reward"]))
    for table in (*others, samples.set_column(5, "tokens", samples["policy_digest"]).drop_columns("logprobs")):
        pq.write_table(table, path)
        sha256 = sha256_of(path)
        kind = "collected" if folder == "batches" else "eval_samples"
        change_row(run_dir, kind, lambda body, sha256=sha256: body.update(sha256=sha256))
        assert f"{path} is damaged" in try_all(run_dir)[0]
        assert path.name in str(gather(run_dir)["notes"])


def test_a_step_that_was_done_twice_counts_once(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = verify(run_dir)
    again = [row for row in verdict.rows if row.kind == "finished"][-1]
    show_verdict(replace(verdict, rows=[*verdict.rows, again]), run_dir, Console())
    assert f" {NUM_STEPS} finished steps" in capsys.readouterr().out
