"""Tests what `lockstep verify` finds in the history of calls: nothing in that of real runs, and every wrong order."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from lockstep.reward.v1 import environment_pb2 as pb
from typer.testing import CliRunner

from services.coordinator.cli.main import app
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.runs.reader import LedgerReader, LedgerRow
from services.coordinator.verify.session import verify
from tests.coordinator.fake_environment import FakeEnvironment
from tests.coordinator.runs.killing import make_run, surviving_services

NUM_STEPS = 2
Lines = list[dict[str, Any]]
STREAMED = {"trainer": {"max_tokens_per_microbatch": 16}}
LAGGED = {"trainer": {"lag": {"versions": 1}, "loss": {"old_logprobs": "engine"}}}


@pytest_asyncio.fixture(scope="module")
async def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return await made(tmp_path_factory.mktemp("verified"))


@pytest_asyncio.fixture(scope="module")
async def streamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return await made(tmp_path_factory.mktemp("streamed"), **STREAMED)


@pytest_asyncio.fixture(scope="module")
async def lagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return await made(tmp_path_factory.mktemp("lagged"), **LAGGED)


@pytest_asyncio.fixture(scope="module")
async def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    environment = {"kind": "python", "path": "m:C", "max_turns": 2}
    return await made(tmp_path_factory.mktemp("played"), FakeEnvironment(_answers), environment=environment)


def _answers(turn: int, text: str) -> pb.StepResponse:
    return pb.StepResponse(messages=[pb.Message(role="", content="7")], done=turn == 1)


async def made(directory: Path, playing: FakeEnvironment | None = None, **changes: Any) -> Path:
    config = make_run(directory, NUM_STEPS, **changes)
    async with surviving_services(playing) as services:
        await services.run(config)
    return config.run_dir


@pytest.fixture
def run_dir(undisturbed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(undisturbed, tmp_path / "runs" / "run")


def history(run_dir: Path) -> Path:
    (path,) = (run_dir / "history").iterdir()
    return path


def read(run_dir: Path) -> Lines:
    return [json.loads(line) for line in history(run_dir).read_text().splitlines()]


def write(run_dir: Path, lines: Lines) -> None:
    history(run_dir).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def place(lines: Lines, **wanted: Any) -> int:
    """Returns the place of the first line that has `wanted`."""
    return next(place for place, line in enumerate(lines) if wanted.items() <= line.items())


def call_of(lines: Lines, method: str, nth: int = 0) -> tuple[int, int]:
    """Returns the places of the first and the last line of a call."""
    begin = [place for place, line in enumerate(lines) if line.get("call") == method][nth]
    end = max(place for place, line in enumerate(lines) if line.get("n") == lines[begin]["n"])
    return begin, end


@pytest.mark.parametrize("run", ["undisturbed", "streamed", "lagged", "played"])
def test_the_calls_of_a_real_run_are_legal(run: str, request: pytest.FixtureRequest) -> None:
    run_dir = request.getfixturevalue(run)
    verdict = verify(run_dir)
    methods = [line["call"] for line in read(run_dir) if "call" in line]
    assert (verdict.violation, verdict.num_calls) == ("", len(methods))
    assert ("environment.Step" in methods) == (run == "played")
    trainer = {"trainer.Train", "trainer.SaveCheckpoint"}
    assert trainer | {"rollout.Generate", "reward.Score", "rollout.CommitWeights"} < {*methods}


def test_lines_may_be_lost_at_both_ends_and_where_it_is_noted(run_dir: Path) -> None:
    lines = read(run_dir)
    for lost in range(1, len(lines), 5):
        rows = max((line["row"] for line in lines[:lost] if "row" in line), default=lines[0]["rows"])
        write(run_dir, [{**lines[0], "rows": rows, "continues": True}, *lines[lost:]])
        assert verify(run_dir).violation == "", f"without the first {lost}"
        write(run_dir, [*lines[:lost], {"t": 0, "lost": 20}, *lines[lost + 20 :]])
        assert verify(run_dir).violation == "", f"without 20 after {lost}"
    write(run_dir, lines)
    history(run_dir).write_bytes(history(run_dir).read_bytes()[:-9])
    assert verify(run_dir).violation == ""


def no_commit(lines: Lines) -> None:
    begin, end = call_of(lines, "rollout.CommitWeights", nth=1)
    del lines[end], lines[begin]


def early_train(lines: Lines) -> None:
    row = place(lines, kind="collected", version=1)
    begin, end = call_of(lines, "trainer.Train", nth=1)
    before = [line for line in lines[row : end + 1] if line.get("n") == lines[begin]["n"]]
    lines[row : end + 1] = [*before, *(line for line in lines[row : end + 1] if line not in before)]
    for number, line in enumerate(lines):
        line["t"] = number


def other_stamp(lines: Lines) -> None:
    begin, _ = call_of(lines, "rollout.Generate", nth=-1)
    lines[begin]["sent"]["expected_stamp"] = [1, "digest 1"]


def other_answer(lines: Lines) -> None:
    _, end = call_of(lines, "rollout.Generate", nth=-1)
    lines[end]["got"][0]["stamp"] = [2, "x"]


def again(lines: Lines, **answer: Any) -> None:
    """Adds a call that sends the last batch again, right after the first; `answer` is changed in its answer."""
    begin, end = call_of(lines, "trainer.Train", nth=-1)
    of_call = [line for line in lines if line.get("n") == lines[begin]["n"]]
    copies = [{**line, "n": 10_000, "t": lines[end]["t"]} for line in of_call]
    copies[-1]["got"] = [{**copies[-1]["got"][0], **answer}]
    lines[end + 1 : end + 1] = copies


def old_epoch(lines: Lines) -> None:
    begin, _ = call_of(lines, "trainer.JoinWeightGroup")
    lines[begin]["sent"]["group"]["epoch"] -= 1


def other_manifest(lines: Lines) -> None:
    _, end = call_of(lines, "trainer.SaveCheckpoint")
    lines[end]["got"][0]["manifest_digest"] = "x"


def lost_row(lines: Lines) -> None:
    lines.append({"t": lines[-1]["t"], "row": 999, "kind": "finished", "version": 3})


def received_other(lines: Lines) -> None:
    _, end = call_of(lines, "rollout.ReceiveWeights", nth=-1)
    lines[end]["got"][0]["digest"] = "x"


def other_batch(lines: Lines) -> None:
    begin, _ = call_of(lines, "trainer.Train", nth=-1)
    of_call = (line for line in lines[begin:] if line.get("n") == lines[begin]["n"])  # lines of others may be between
    header = next(line["sent"]["header"] for line in of_call if "header" in line.get("sent", {}))
    header["batch_id"] += "0"


DAMAGES: dict[str, tuple[Callable[[Lines], None], str]] = {
    "a publication without a commit": (no_commit, "had committed it"),
    "a batch that is not on disk": (early_train, "was sent before it was on disk"),
    "samples of other weights": (other_stamp, "was asked for version 1 (digest 1), but serves version 2"),
    "an answer of other weights": (other_answer, "and answered with version 2 (x)"),
    "a batch that is applied twice": (again, "was applied twice: the trainer held {2}"),
    "a batch that is answered otherwise": (
        lambda lines: again(lines, replayed=True, metrics="x"),
        "was answered again, but with other metrics",
    ),
    "an old epoch": (old_epoch, "but the newest one in the ledger is"),
    "another checkpoint": (other_manifest, "the trainer saved a manifest of SHA-256 x"),
    "a row that the ledger has lost": (lost_row, "the ledger has lost row 999"),
    "other weights received": (received_other, "but received version 2 (x)"),
    "another batch id": (other_batch, "is not that of version 1"),
}


def assert_named(run_dir: Path, damage: Callable[[Lines], None], said: str) -> None:
    lines = read(run_dir)
    damage(lines)
    write(run_dir, lines)
    verdict = verify(run_dir)
    assert said in verdict.violation
    assert verdict.lines


@pytest.mark.parametrize("name", DAMAGES)
def test_a_wrong_order_is_named(run_dir: Path, name: str) -> None:
    assert_named(run_dir, *DAMAGES[name])


def turn_left_out(lines: Lines) -> None:
    begin, _ = call_of(lines, "environment.Step")
    lines[begin]["sent"]["turn"] = 1


def never_began(lines: Lines) -> None:
    begin, end = call_of(lines, "environment.Reset")
    del lines[end], lines[begin]


def later_turn(lines: Lines) -> None:
    """Adds the next turn of an episode after the next publication."""
    begin, _ = call_of(lines, "environment.Step")
    later = place(lines, kind="published", version=1)
    last = max(line["sent"]["turn"] for line in lines[:later] if line.get("call") == "environment.Step")
    sent = {**lines[begin]["sent"], "turn": last + 1}
    lines.insert(later + 1, {**lines[begin], "n": 10_000, "t": lines[later]["t"], "sent": sent})


EPISODES: dict[str, tuple[Callable[[Lines], None], str]] = {
    "a turn that is left out": (turn_left_out, "came after its turn -1"),
    "an episode that never began": (never_began, "which never began"),
    "a turn after the next publication": (later_turn, "began with version 0 (digest 0) and went on with version 1"),
}


@pytest.mark.parametrize("name", EPISODES)
def test_so_is_a_wrong_turn(played: Path, tmp_path: Path, name: str) -> None:
    assert_named(shutil.copytree(played, tmp_path / "run"), *EPISODES[name])


def test_a_batch_may_be_answered_again(run_dir: Path) -> None:
    lines = read(run_dir)
    again(lines, replayed=True)
    write(run_dir, lines)
    assert verify(run_dir).violation == ""


def test_the_command_shows_the_last_lines_up_to_the_violation(run_dir: Path) -> None:
    lines = read(run_dir)
    other_stamp(lines)
    write(run_dir, lines)
    done = CliRunner().invoke(app, ["verify", str(run_dir)])
    assert done.exit_code == 1
    *_, wrong, last = done.output.splitlines()
    assert "rollout.Generate" in wrong
    assert last.startswith("violation after ")
    history(run_dir).write_text(history(run_dir).read_text() + "{\n")
    write_damaged = CliRunner().invoke(app, ["verify", str(run_dir)])
    assert write_damaged.exit_code == 1


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_no_violation(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    read, manifest = LedgerReader.rows, run_dir / "checkpoints" / "step-000002" / "manifest.json"

    def read_before_it_is_deleted(ledger: LedgerReader) -> list[LedgerRow]:
        rows = read(ledger)
        if manifest.exists():
            with closing(Ledger(run_dir / "ledger.sqlite")) as own:
                (path,) = {row["path"] for row in own.all(Kind.SAVED) if Path(row["path"]).name == manifest.parent.name}
                own.record(Kind.DELETED, path=path)
            shutil.rmtree(manifest.parent)
        return rows

    monkeypatch.setattr(LedgerReader, "rows", read_before_it_is_deleted)
    assert verify(run_dir).violation == ""
    assert not manifest.exists()
