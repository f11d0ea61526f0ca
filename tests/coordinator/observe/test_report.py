"""Tests `lockstep report`: the page shows everything about a run, and text from a model is never parsed as HTML."""

import errno
import json
import os
import shutil
import subprocess
from contextlib import closing
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models

from services.common.batches import SAMPLE_SCHEMA
from services.common.errors import InvalidInput, LockstepError, NotFound
from services.coordinator.observe.report import curves, samples
from services.coordinator.observe.report.page import gather, render, write_report
from services.coordinator.runs.ledger import LEDGER, Kind, Ledger
from tests.coordinator.fake_services import make_config
from tests.support import raises

HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "\"'&amp;<b>{{7*7}}${x}`",
    "]]></style><script>document.title='owned'</script>",
    "\u2028\u2029\x00",
]
WORDS = ["<eos>", *HOSTILE, *(f"word{index} " for index in range(50))]
NUM_STEPS = 3


def write_tokenizer(directory: Path) -> None:
    directory.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def sample(group: int, number: int, version: int, **changes: Any) -> dict[str, Any]:
    return {
        "prompt_id": f"p{group}",
        "group": group,
        "sample": number,
        "prompt_tokens": [group % 5 + 1],
        "tokens": [6 + group, number % 5 + 1, 0],
        "logprobs": [-1.0, -1.0, -1.0],
        "reward": float(number % 2),
        "components": [("exact", float(number % 2)), ("</script>", 0.5)],
        "advantages": [1.0 - 2.0 * (number % 2)] * 3,
        "finish_reason": "length" if number == 3 else "stop",
        "policy_version": version,
        "policy_digest": f"{version:032x}",
        "scorer": "exact 1 x 1",
        "seed": number,
    } | changes


def numbers(step: int) -> dict[str, float]:
    return {
        "step": step,
        "reward/mean": 0.5 + step / 100,
        "train/loss": -0.25 * step,
        "train/grad_norm": float("nan") if step == 2 else 1.5,
        "train/logprob_diff_mean": 1e-7,
        "train/logprob_diff_max": 1e-5,
        "completion/tokens_mean": 3.0,
        "time/generating_s": 1.0,
        "time/training_s": 2.0,
        "time/publishing_s": 0.5,
        "time/step_s": 4.0,
        "time/tokens_per_s": 100_000.0 * step,
        "sampling/dropped_zero_variance": 2.0,
    }


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the files of a run of three steps and an evaluation."""
    base = tmp_path_factory.mktemp("report")
    write_tokenizer(base / "model")
    directory = base / "runs" / "run"
    for name in ("batches", "evaluations", "logs"):
        (directory / name).mkdir(parents=True)
    trackers = {"trackers": [{"kind": "mlflow", "uri": "http://me:s3@cret@h"}]}
    paths = {"runs_dir": base / "runs", "model": str(base / "model")}
    config = make_config(name="run", **paths, num_steps=NUM_STEPS, observability=trackers)
    with closing(Ledger(directory / LEDGER)) as ledger:
        opened = {"run_id": "run-1", "config": config.model_dump_json(), "checkpoint": ""}
        ledger.record(Kind.OPENED, **opened, versions={"lockstep-rl": "0.1.0"})
        ledger.record(Kind.EVALUATED, 0, **{"eval/test/reward": 0.25})
        ledger.record(Kind.EVALUATED, NUM_STEPS, **{"eval/test/reward": 0.75})
    lines = [{"step": 0, "eval/test/reward": 0.25}, *map(numbers, range(1, NUM_STEPS + 1))]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for version in range(NUM_STEPS):
        rows = [sample(group, number, version) for group in range(8) for number in range(4)]
        table = pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)
        pq.write_table(table, directory / "batches" / f"step-{version:06d}.parquet")
    pq.write_table(table.slice(0, 4), directory / "evaluations" / f"test-step-{NUM_STEPS:06d}.parquet")
    begin = "2026-11-21 15:56:18,408"
    (directory / "logs" / "trainer.log").write_text(
        f"{begin} I trainer services.rpc: /lockstep.trainer.v1.TrainerService/Train: STALE_STAMP old <b>\n" * 2
    )
    (directory / "logs" / "coordinator.log").write_text(
        f"{begin} W services.coordinator.clients.reward: prompt p1: scorer code: TIMEOUT: 5 s (zero)\n"
        '{"time": "2026-11-21T15:56:18.408+00:00", "message": "lost replica 127.0.0.1:5: gone"}\n{"torn'
    )
    return directory


def files(directory: Path) -> dict[Path, bytes]:
    """Returns the content of every file except SQLite's shared memory, in which readers leave marks."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.suffix != ".sqlite-shm"}


class Tags(HTMLParser):
    """Collects the elements of a page and the content of its scripts."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data)


def test_everything_of_the_run_is_in_the_page(run_dir: Path) -> None:
    before = files(run_dir)
    data = gather(run_dir)
    assert files(run_dir) == before
    facts = dict(data["facts"])
    assert (data["name"], data["state"], facts["steps"]) == ("run", "done", "3 of 3")
    assert facts["held-out"] == "test/reward 0.250 → 0.750"
    assert facts["versions"] == "lockstep-rl 0.1.0" and '"uri": "http://h"' in data["config"]
    panels = {panel["title"]: panel["series"] for panel in data["panels"]}
    assert panels["Reward"] == [
        {"name": "training", "x": [1, 2, 3], "y": [0.51, 0.52, 0.53]},
        {"name": "test", "x": [0], "y": [0.25]},
    ]
    assert panels["Gradient norm"][0]["y"] == [1.5, "nan", 1.5]
    assert data["timeline"]["steps"] == [1, 2, 3]
    seconds = {phase["name"]: phase["seconds"][0] for phase in data["timeline"]["phases"]}
    assert seconds == {"generating and scoring": 1.0, "training": 2.0, "publishing": 0.5, "other": 0.5}
    assert data["histogram"] == {"labels": ["0", "1"], "counts": {step: [16, 16] for step in (1, 2, 3)}}
    assert [source["label"] for source in data["samples"]] == [
        "step 1",
        "step 2",
        "step 3",
        "held-out test after step 3",
    ]
    newest = data["samples"][2]
    assert (newest["total"], len(newest["columns"]["group"]), newest["stamps"]) == (32, 32, [(2, f"{2:032x}")])
    assert newest["prompts"][0] == ("p0", HOSTILE[0], None), "files of earlier releases have no answers"
    row = {name: values[5] for name, values in newest["columns"].items()}
    assert row["completion"] == f"word1 {HOSTILE[1]}<eos>"
    assert (row["reward"], row["components"], row["advantage"], row["stop"]) == (1.0, [1.0, 0.5], -1.0, "stop")
    assert {(one["what"], one["reason"], one["count"]) for one in data["failures"]} == {
        ("prompt groups dropped", "ZERO_VARIANCE", 6),
        ("Train of trainer", "STALE_STAMP", 2),
        ("scorer code", "TIMEOUT", 1),
        ("replica 127.0.0.1:5", "LOST", 1),
    }
    assert data["notes"] == []


def test_a_run_that_is_going_on_is_read_and_left_alone(run_dir: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run_dir, tmp_path / "run")
    with closing(Ledger(moved / LEDGER)) as ledger:
        ledger.record(Kind.EVALUATED, NUM_STEPS, **{"eval/test/reward": 0.875})  # in the write-ahead log only
        before = files(moved)
        data = gather(moved)
        assert files(moved) == before
        assert (data["state"], dict(data["facts"])["held-out"]) == ("running", "test/reward 0.250 → 0.875")
    assert gather(moved)["state"] == "done"


def test_text_of_a_model_stays_text(run_dir: Path) -> None:
    data = gather(run_dir)
    page = Tags(render(data))
    assert page.tags.count("script") == 2
    assert not {"img", "b", "link", "iframe"} & set(page.tags)
    embedded, script = page.scripts
    assert "<" not in embedded
    assert json.loads(embedded) == json.loads(json.dumps(data))
    assert "innerHTML" not in script and "http://" not in script.replace("http://www.w3.org/2000/svg", "")


def test_what_does_not_fit_is_left_out_here_and_there_and_said(run_dir: Path) -> None:
    found = samples.sources(run_dir)
    many = [samples.Source(found[0].path, step) for step in range(1, 101)]
    shown, left_out = samples.embed(many, lambda tokens: "text", max_bytes=100_000)
    steps = [source["step"] for source in shown]
    assert len(shown) + len(left_out) == 100
    assert 10 < len(shown) < 60
    assert steps == sorted(steps) and (steps[0], steps[-1]) == (1, 100)
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) <= 4 * min(gaps)
    assert len(samples.to_json(shown)) <= 100_000 + 2 * len(shown)
    (few,), _ = samples.embed(many[:1], lambda tokens: "text", max_bytes=1_000)
    groups = few["columns"]["group"]
    assert 0 < len(groups) < few["total"] == 32
    assert all(groups.count(group) == 4 for group in groups)  # whole groups only


def test_long_text_and_many_steps_are_cut_and_said() -> None:
    text = samples._text([0], lambda tokens: "a" * 20_000)
    assert "[… 6,000 characters left out …]" in text and len(text) < 14_100
    rows = [numbers(step) for step in range(1, 5002)]
    thinned = curves.thin(rows)
    assert len(thinned) <= curves.MAX_STEPS and thinned[-1]["step"] == 5001
    assert {after["step"] - before["step"] for before, after in pairwise(thinned)} == {3}


def test_without_tokenizer_there_are_token_ids_and_a_note(run_dir: Path, tmp_path: Path) -> None:
    moved = tmp_path / "run"
    shutil.copytree(run_dir, moved)
    model = run_dir.parents[1] / "model"
    model.rename(model.with_name("gone"))
    try:
        data = gather(moved)
    finally:
        model.with_name("gone").rename(model)
    assert data["samples"][0]["columns"]["completion"][5] == "7 2 0"
    assert "token ids" in data["notes"][0]


def test_a_directory_without_a_run_and_a_damaged_one(run_dir: Path, tmp_path: Path) -> None:
    with raises(NotFound, field="run_dir"):
        write_report(tmp_path)
    with raises(NotFound, field="run_dir"):
        write_report(tmp_path / "runs" / "nope")
    with raises(NotFound, field="out"):
        write_report(run_dir, tmp_path / "nowhere" / "page.html")
    with raises(InvalidInput, field="out"):
        write_report(run_dir, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        denied = PermissionError(errno.EACCES, "Permission denied")
        patch.setattr(Path, "open", Mock(side_effect=denied))
        with pytest.raises(LockstepError, match=r"ledger.sqlite cannot be read: Permission denied; give this user acc"):
            gather(run_dir)
    moved = tmp_path / "run"
    shutil.copytree(run_dir, moved)
    with (moved / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # the coordinator is still writing it
    assert gather(moved)["notes"] == []
    with (moved / "metrics.jsonl").open("a") as file:
        file.write("\n")  # more was written after a disk had been full
    assert gather(moved)["notes"] == ["Line 5 of metrics.jsonl is damaged; the ledger has its numbers."]


def test_what_a_run_has_lost_is_named_and_the_rest_is_shown(run_dir: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(run_dir, tmp_path / "run"))
    (moved / "metrics.jsonl").unlink()
    (moved / "batches" / "step-000001.parquet").write_bytes(b"PAR1")
    shutil.rmtree(moved / "logs")
    with closing(Ledger(moved / LEDGER)) as ledger:
        for step in range(1, NUM_STEPS + 1):
            ledger.record(Kind.FINISHED, step, **{name: one for name, one in numbers(step).items() if name != "step"})
        ledger.record(Kind.EVALUATED, NUM_STEPS, **{"eval/test/reward": 0.75})
    data = gather(moved)
    panels = {panel["title"]: panel["series"] for panel in data["panels"]}
    assert panels["Reward"][0]["y"] == [0.51, 0.52, 0.53]
    assert panels["Reward"][1] == {"name": "test", "x": [0, 3], "y": [0.25, 0.75]}
    assert [source["label"] for source in data["samples"]] == ["step 1", "step 3", "held-out test after step 3"]
    assert data["notes"] == ["Not shown, because they are damaged: step-000001.parquet."]
    assert "step 3" in write_report(moved).read_text(encoding="utf-8")


def test_a_run_of_another_user_neither_hangs_the_command_nor_has_it_overwrite_a_file(
    run_dir: Path, tmp_path: Path
) -> None:
    moved, mine = Path(shutil.copytree(run_dir, tmp_path / "run")), tmp_path / "mine"
    for pipe in ("logs/x.log", "batches/step-000009.parquet", "evaluations/test-step-000009.parquet"):
        os.mkfifo(moved / pipe)
    mine.write_text("mine")
    (moved / "report.html").unlink(missing_ok=True)
    (moved / "report.html").symlink_to(mine)
    with pytest.raises(InvalidInput, match=r"report\.html is not a regular file: remove it, or name another .* --out"):
        write_report(moved)
    write_report(moved, tmp_path / "report.html")
    assert mine.read_text() == "mine"


def test_a_run_of_numbers_that_are_not_finite_is_shown(run_dir: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(run_dir, tmp_path / "run"))
    rows = [sample(group, 0, 0, reward=float(("nan", "inf", "-inf")[group % 3])) for group in range(24)]
    pq.write_table(pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA), moved / "batches" / "step-000000.parquet")
    write_report(moved)


def test_an_evaluation_is_drawn_with_the_step_that_it_follows() -> None:
    def evaluated(step: int, seconds: float) -> dict[str, float]:
        return {"step": step, "eval/test/reward": 0.5, "time/evaluating_s": seconds}

    rows = [evaluated(0, 0.25), numbers(1), numbers(2), evaluated(2, 0.5), numbers(3), evaluated(3, 0.75)]
    drawn = {phase["name"]: phase["seconds"] for phase in curves.phases(rows)["phases"]}
    assert drawn["evaluating"] == [0.25, 0.5, 0.75]
    assert drawn["other"] == [0.5] * 3
    older = numbers(2) | {"time/evaluating_s": 0.125}  # kept with the next step
    drawn = {phase["name"]: phase["seconds"] for phase in curves.phases([numbers(1), older])["phases"]}
    assert (drawn["evaluating"], drawn["other"]) == ([0, 0.125], [0.5, 0.375])


def test_generating_that_overlaps_with_training_is_not_drawn_twice() -> None:
    lagged = {"step": 1, "time/step_s": 5.0, "time/generating_s": 3.0, "time/training_s": 4.0, "time/publishing_s": 0.5}
    drawn = {phase["name"]: phase["seconds"] for phase in curves.phases([lagged])["phases"]}
    assert drawn == {"generating and scoring": [0.5], "training": [4.0], "publishing": [0.5]}


def episode(number: int) -> dict[str, Any]:
    """Returns a row of two turns of the policy; the environment answers the first with hostile text."""
    turns = {"turn_begins": [0, 3], "turn_ends": [2, 5], "turn_rewards": [0.25, 0.0], "environment": "e 1"}
    return sample(0, number, 0, tokens=[6, 0, 1, 7, 0], logprobs=[-1.0] * 5, advantages=[1.0] * 5, **turns)


@pytest.fixture
def episodes_dir(run_dir: Path, tmp_path: Path) -> Path:
    """Returns a copy of the run whose first step has episodes."""
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    table = pa.Table.from_pylist([episode(number) for number in range(4)], schema=SAMPLE_SCHEMA)
    for path in (copy / "batches").glob("*.parquet"):
        path.unlink()
    pq.write_table(table, copy / "batches" / "step-000000.parquet")
    return copy


def test_an_episode_is_a_conversation(episodes_dir: Path) -> None:
    (steps, evaluation) = gather(episodes_dir)["samples"]
    conversation = [("word0 <eos>", 0.25), (HOSTILE[0], None), ("word1 <eos>", 0.0)]
    assert steps["columns"]["turns"] == [conversation] * 4
    assert evaluation["columns"]["turns"] == [None] * 4, "samples without an environment have no turns"


def test_a_held_out_episode_whose_environment_failed_has_no_turns(episodes_dir: Path) -> None:
    failed = sample(0, 0, NUM_STEPS, tokens=[], logprobs=[], advantages=None, reward=0.0, components=[])
    failed |= {"turn_begins": [], "turn_ends": [], "turn_rewards": [], "environment": ""}
    path = episodes_dir / "evaluations" / f"test-step-{NUM_STEPS:06d}.parquet"
    pq.write_table(pa.Table.from_pylist([failed], schema=SAMPLE_SCHEMA), path)
    (_, evaluation) = gather(episodes_dir)["samples"]
    assert evaluation["columns"]["turns"] == [[]]


CHROMIUM = shutil.which("chromium")


def drawn(page: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Returns the page as the browser has drawn it, and the browser's log."""
    assert CHROMIUM
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--dump-dom"]
    command += ["--enable-logging=stderr", f"--user-data-dir={directory / 'profile'}", "--virtual-time-budget=2000"]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=True)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_the_turns_of_an_episode(episodes_dir: Path, tmp_path: Path) -> None:
    page = write_report(episodes_dir, tmp_path / "report.html")
    done = drawn(page, tmp_path)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    table = done.stdout.partition('<table id="rows">')[2].partition("</table>")[0]
    assert table.count('class="turn policy"') == 8 and table.count('class="turn environment"') == 4
    assert table.count("policy · reward 0.25") == 4
    assert table.count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;") >= 4 and Tags(table).tags.count("img") == 0


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_it_without_errors(run_dir: Path, tmp_path: Path) -> None:
    page = write_report(run_dir, tmp_path / "report.html")
    done = drawn(page, tmp_path)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    tags = Tags(done.stdout).tags
    assert tags.count("figure") == 6 + 1  # panels, histogram
    assert tags.count("polyline") == 9  # one of them cut in two by a NaN
    assert ">100k</text>" in done.stdout and ">100,000</text>" not in done.stdout
    assert tags.count("img") == 0
    table = done.stdout.partition('<table id="rows">')[2].partition("</table>")[0]
    assert table.count("<tr>") == 1 + 25
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in table
    assert "<title>run" in done.stdout  # and not owned
    failures = done.stdout.partition('<table id="failures">')[2].partition("</table>")[0]
    assert "STALE_STAMP" in failures and "old &lt;b&gt;" in failures
