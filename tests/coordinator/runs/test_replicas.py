"""Tests the list of replicas of a run in progress, as `lockstep replicas` shows and changes it."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from lockstep.coordinator.v1 import coordinator_pb2 as pb
from typer.testing import CliRunner

from services.common.errors import InvalidInput, LockstepError, PreconditionFailed, Reason
from services.coordinator.cli.main import app
from services.coordinator.runs.ledger import LEDGER, Kind, Ledger
from services.coordinator.runs.replicas import (
    REPLICAS,
    Note,
    change_replicas,
    listed_replicas,
    parse_replicas,
    replica_state,
    write_notes,
    write_replicas,
)
from tests.coordinator.fake_services import make_config
from tests.support import raises

A, B, C = "10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051"
SERVING_A, SERVING_B = (pb.Replica(address=address, version=3, is_wanted=True) for address in (A, B))


def begin(directory: Path, **rollout: Any) -> Ledger:
    """Opens a run with A and B, which have received version 3."""
    directory.mkdir()
    (directory / "config.json").write_text(make_config(rollout=rollout).model_dump_json())
    ledger = Ledger(directory / LEDGER)
    ledger.record(Kind.OPENED)
    write_replicas(directory, [A, B])
    ledger.record(Kind.PUBLISHED, 3, digest="d", received={A: "d", B: "d"})
    return ledger


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    with closing(begin(tmp_path / "run")):
        yield tmp_path / "run"


def test_what_is_listed_follows_from_the_list_and_the_last_publication(run_dir: Path) -> None:
    found = change_replicas(run_dir, add=[C], remove=[A])
    assert found == [pb.Replica(address=A, version=3), SERVING_B, pb.Replica(address=C, is_wanted=True)]
    assert [replica_state(replica) for replica in found] == ["leaving", "serving", "joining"]
    assert parse_replicas((run_dir / REPLICAS).read_text()) == [B, C]
    assert change_replicas(run_dir, add=[A, B], remove=[C]) == listed_replicas(run_dir)
    assert [replica_state(replica) for replica in listed_replicas(run_dir)] == ["serving", "serving"]


def test_before_its_first_publication_all_join(tmp_path: Path) -> None:
    with closing(begin(tmp_path / "run")) as ledger:
        ledger.record(Kind.OPENED)  # another session
        assert {replica_state(replica) for replica in listed_replicas(tmp_path / "run")} == {"joining"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"add": ["nowhere"]}, "'nowhere' is not HOST:PORT"),
        ({"remove": [C]}, f"{C}: the run has {A}, {B}"),
        ({"remove": [A, B]}, "add another one before you remove the last"),
    ],
)
def test_a_wrong_change_changes_nothing(run_dir: Path, changes: dict[str, list[str]], error: str) -> None:
    with pytest.raises(InvalidInput, match=error):
        change_replicas(run_dir, **changes)
    assert parse_replicas((run_dir / REPLICAS).read_text()) == [A, B]


@pytest.mark.parametrize("ignored", ["", "nowhere\n"])
def test_a_list_that_changes_nothing_leaves_the_replicas_that_serve(run_dir: Path, ignored: str) -> None:
    (run_dir / REPLICAS).write_text(ignored)
    assert listed_replicas(run_dir) == [SERVING_A, SERVING_B]
    with raises(InvalidInput, field="address"):
        change_replicas(run_dir, remove=[C])
    change_replicas(run_dir, add=[C], remove=[B])
    assert parse_replicas((run_dir / REPLICAS).read_text()) == [A, C]


def test_what_does_not_serve_is_listed_with_the_reason(run_dir: Path) -> None:
    change_replicas(run_dir, add=["alias:1", C], remove=[A])
    write_notes(run_dir, {C: Note("unreachable: connection refused"), "alias:1": Note("as A", True, same_as=A)})
    assert listed_replicas(run_dir) == [
        SERVING_A,  # it stays under its other name
        SERVING_B,
        pb.Replica(address="alias:1", is_wanted=True, note="as A", is_unused=True),
        pb.Replica(address=C, is_wanted=True, note="unreachable: connection refused"),
    ]
    shown = CliRunner().invoke(app, ["replicas", "list", str(run_dir)]).output
    assert all(word in shown for word in ("unused", "as A", "joining", "unreachable: connection refused"))


def test_a_run_that_is_not_in_progress_has_no_replicas(run_dir: Path, tmp_path: Path) -> None:
    with closing(begin(tmp_path / "killed")):
        pass  # it leaves its file
    for directory in (tmp_path, tmp_path / "killed"):
        for call in (listed_replicas, lambda at: change_replicas(at, add=[C])):
            with raises(PreconditionFailed, reason=Reason.WRONG_STATE):
                call(directory)


@pytest.mark.parametrize(
    ("discovery", "says"),
    [
        ({"kind": "file", "path": "/etc/replicas"}, "those in /etc/replicas"),
        ({"kind": "dns", "name": "rollout.svc"}, "the DNS name rollout.svc"),
    ],
)
def test_a_list_from_elsewhere_is_changed_there(tmp_path: Path, discovery: dict[str, str], says: str) -> None:
    with closing(begin(tmp_path / "run", discovery=discovery)):
        with pytest.raises(LockstepError, match=says):
            change_replicas(tmp_path / "run", add=[C])
        assert len(listed_replicas(tmp_path / "run")) == 2


def test_the_command_shows_and_changes_the_list(run_dir: Path) -> None:
    for command in (["list"], ["add", C], ["remove", A, B]):
        shown = CliRunner().invoke(app, ["replicas", command[0], str(run_dir), *command[1:]])
        assert shown.exit_code == 0, shown.exception
    rows = [line.strip("│").split("│") for line in shown.output.splitlines() if "10.0.0." in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [A, "leaving", "3"],
        [B, "leaving", "3"],
        [C, "joining", ""],
    ]
