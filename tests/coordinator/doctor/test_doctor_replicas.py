"""Tests what doctor says about lists of replicas, about restarts and about `resume`."""

from pathlib import Path

import pytest

from services.coordinator.doctor import Verdict
from services.coordinator.doctor.session import examine_replicas, examine_resume
from services.coordinator.fleet.launch import Addresses
from tests.coordinator.fake_services import make_config
from tests.coordinator.runs.test_resume import begin, save

GIVEN = Addresses(trainer="127.0.0.1:1")


@pytest.mark.parametrize(
    ("text", "verdict", "found"),
    [
        ("10.0.0.1:1\n10.0.0.2:1\n", Verdict.OK, "2 replicas: 10.0.0.1:1, 10.0.0.2:1"),
        ("", Verdict.WARN, "the list is empty"),
        (None, Verdict.WARN, "No such file"),
        ("nowhere", Verdict.FAIL, "'nowhere' is not HOST:PORT"),
    ],
)
def test_the_list_of_replicas_is_read(tmp_path: Path, text: str | None, verdict: Verdict, found: str) -> None:
    if text is not None:
        (tmp_path / "replicas").write_text(text)
    config = make_config(rollout={"discovery": {"kind": "file", "path": str(tmp_path / "replicas")}})
    (finding,) = examine_replicas(config, GIVEN)
    assert (finding.verdict, found in finding.result) == (verdict, True), finding


def test_it_says_what_a_death_costs() -> None:
    def says(**sections: object) -> str:
        (finding,) = examine_replicas(make_config(**sections), Addresses())
        return finding.result

    assert "up to 3 times in 3600 s" in says() and "resumes from step 1 (checkpoint.save_freq is 0)" in says()
    assert "at most 5 steps old" in says(checkpoint={"save_freq": 5})
    assert "no service is started again" in says(restart={"max": 0})
    assert not list(examine_replicas(make_config(), GIVEN))


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    (finding,) = examine_resume(make_config(runs_dir=tmp_path, resume=str(tmp_path / "step-000010")))
    assert finding.verdict is Verdict.FAIL and "step-000010 is not a checkpoint" in finding.result
    (finding,) = examine_resume(make_config(runs_dir=tmp_path, resume="never"))
    assert finding.verdict is Verdict.OK
    assert not list(examine_resume(make_config(runs_dir=tmp_path)))


def test_a_checkpoint_that_was_lost(tmp_path: Path) -> None:
    begin(tmp_path)
    (save(tmp_path, 2) / "manifest.json").unlink()
    (finding,) = examine_resume(make_config(runs_dir=tmp_path))
    assert "manifest.json is missing" in finding.result
    assert finding.fix == "restore it, or set resume to another checkpoint"
