"""Tests which failures of a run a report lists."""

from pathlib import Path

from services.coordinator.observe.report.page import Failure, failures


def test_failed_episodes_are_failures(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    where = "2026-01-01 00:00:0{} W services.coordinator.clients.reward: prompt p-1 sample {}"
    lines = [where.format(n, n) + ": environment: invalid_reply: done is 1" for n in (1, 2)]
    lines += [where.format(3, 3) + end for end in (": environment: set_aside: hangs again", ": else")]
    (tmp_path / "logs" / "coordinator.log").write_text("\n".join(lines))
    assert failures(tmp_path, []) == [
        Failure("environment", "INVALID_REPLY", 2, "2026-01-01 00:00:02", "done is 1"),
        Failure("environment", "SET_ASIDE", 1, "2026-01-01 00:00:03", "hangs again"),
    ]


def test_warnings_of_steps_are_failures(tmp_path: Path) -> None:
    unmixed = {"warning/steps_without_mixed_group": 1.0, "warning/entropy_collapse": 0.0}
    steps = [{"step": 1, **unmixed}, {"step": 2, **unmixed}, {"step": 3, "warning/entropy_collapse": 1.0}]
    assert [(one.reason, one.count, one.last) for one in failures(tmp_path, steps)] == [
        ("NO_MIXED_GROUP", 2, "step 2"),
        ("ENTROPY_COLLAPSE", 1, "step 3"),
    ]
