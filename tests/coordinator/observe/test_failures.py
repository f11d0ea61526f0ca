"""Tests which failures of a run a report lists, and that it shows the calls of agents that failed as plain text."""

import json
import os
import shutil
from pathlib import Path

import pytest

from services.coordinator.clients.environment import EnvironmentFailure, EpisodeFailed
from services.coordinator.data.calls import CallLog
from services.coordinator.observe.report.page import Failure, failed_episodes, failures, gather, render, write_report
from services.coordinator.rl.sampling.collect import with_calls
from tests.coordinator.observe.test_report import CHROMIUM, HOSTILE, Tags, drawn, run_dir

__all__ = ["run_dir"]


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


def say(role: str, content: object, **others: object) -> dict[str, object]:
    return {"role": role, "content": content, **others}


def fail(run_dir: Path, prompt: int, attempt: int, *texts: str) -> Path:
    """Keeps the calls of an agent that sends each text and gets it back, as the loop does. Returns the file."""
    log, messages = CallLog(), list[dict[str, object]]()
    for number, text in enumerate(texts):
        entry = {"number": number, "messages": []}
        log.calls.append(entry)
        log.keep(entry, {"messages": [*messages, say("user", text)], "tools": [], "stop": []})
        log.answer(entry, answer := say("assistant", text, tool_calls=[{"id": text}]), "tool_calls")
        messages += [say("user", text), answer]
    log.calls.append({"number": len(texts), "messages": [], "status": "context_length_exceeded"})
    error = EpisodeFailed(EnvironmentFailure.CRASHED, f"KeyError: {HOSTILE[0]}")
    path = Path(with_calls(error, run_dir, f"{prompt}-ab/3/{attempt:032x}", log).detail.partition("are in ")[2])
    os.utime(path, (0, 10 * prompt + attempt))
    return path


@pytest.fixture
def failed_dir(run_dir: Path, tmp_path: Path) -> Path:
    """Returns a copy of the run with agents that failed: one was played twice, one has written much."""
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    for attempt in (1, 2):
        fail(copy, 17, attempt, HOSTILE[0], f"attempt {attempt} {HOSTILE[1]}")
    fail(copy, 18, 1, "first", *(f"{number:02d}" + "x" * 5000 for number in range(10)))
    return copy


def test_the_calls_of_an_agent_that_failed_are_shown_as_text(failed_dir: Path) -> None:
    (long, short), notes = failed_episodes(failed_dir)
    assert notes == []
    assert (short["prompt"], short["sample"], short["failure"]) == ("17-ab", "3", "crashed")
    assert short["detail"] == f"KeyError: {HOSTILE[0]}"
    last = f"attempt 2 {HOSTILE[1]}"
    assert short["messages"] == [
        ("call 0 · user", HOSTILE[0], False),
        ("call 0 · tool_calls", f"{HOSTILE[0]}\n" + json.dumps({"tool_calls": [{"id": HOSTILE[0]}]}), True),
        ("call 1, which continues call 0 · user", last, False),
        ("call 1, which continues call 0 · tool_calls", f"{last}\n" + json.dumps({"tool_calls": [{"id": last}]}), True),
        ("call 2 · context_length_exceeded", "", False),
    ]
    assert long["messages"][0] == ("20 earlier messages left out", "", False)
    assert long["messages"][-2][1].startswith("09xx") and sum(len(text) for _, text, _ in long["messages"]) <= 20_000
    page = Tags(render(gather(failed_dir)))
    assert "20 earlier messages left out" in page.scripts[0] and "attempt 2" in page.scripts[0]
    assert "<" not in page.scripts[0] and not {"img", "b"} & set(page.tags)


def test_the_newest_agents_that_failed_are_shown_and_damaged_files_are_named(tmp_path: Path) -> None:
    for prompt in range(25):
        fail(tmp_path, prompt, 1, "text")
    folder = tmp_path / "failed_episodes"
    broken = ["", "{", "[]\n", '{"episode": "1-ab"}', (folder / f"24-ab-3-{1:032x}.jsonl").read_text()[:-9]]
    for number, text in enumerate(broken):
        (folder / f"{number}-cd-0-x.jsonl").write_text(text)
    os.mkfifo(folder / "a-pipe.jsonl")
    shown, notes = failed_episodes(tmp_path)
    assert [one["prompt"] for one in shown] == [f"{prompt}-ab" for prompt in range(24, 9, -1)]
    assert [note.count(".jsonl") for note in notes] == [5, 0] and "newest 20 of 30 samples" in notes[1]
    assert failed_episodes(tmp_path / "none") == ([], [])


def test_a_file_of_an_agent_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(tmp_path, 24, 1, "text")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "open", refuse)
    shown, notes = failed_episodes(tmp_path)
    assert shown == [] and "24-ab-" in notes[0]


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_the_calls_of_an_agent_that_failed(failed_dir: Path, tmp_path: Path) -> None:
    done = drawn(write_report(failed_dir, tmp_path / "report.html"), tmp_path)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    part = done.stdout.partition('<div id="failed-episodes">')[2].partition("</section>")[0]
    tags = Tags(part).tags
    assert tags.count("details") == 2 and not {"img", "b"} & set(tags)
    assert " prompt 17-ab sample 3" in part and "KeyError: &lt;/script&gt;&lt;img" in part
