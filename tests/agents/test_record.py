"""Tests the record of agents' calls: `verify` and `replay` name what differs, and rewards come from recorded files."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from services.common.config.run import Config
from services.common.errors import NotFound
from services.coordinator.data.calls import EPISODE_SCHEMA, requests_of
from services.coordinator.data.groups import ScoredGroup, to_episodes
from services.coordinator.observe.report.samples import Source, _calls, embed, histogram
from services.coordinator.replay.record import Batch
from services.coordinator.replay.rewards import replay_calls, replay_rewards
from services.coordinator.runs.ledger import LEDGER, Kind, Ledger
from services.coordinator.runs.record import CollectedBatch, RunRecord, batch_path, calls_path, sha256_of
from services.coordinator.verify.samples import check_calls
from tests.agents.harness import STAMP, Stage, make_chat_tokenizer, staged, table_of
from tests.agents.test_episodes import AGENTS, says

Rows = list[dict[str, Any]]
# Judges the collected file and the exit code alone.
SCORER = "tests.agents.test_record:score"
_AGENT = """
import json, os, pathlib, urllib.request

def ask(*texts, back="", **more):
    history = []
    for text in texts:
        history.append({"role": "user", "content": text})
        body = json.dumps({"messages": history, **more}).encode()
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        try:
            message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            return str(error.code)
        history.append({**message, "content": message["content"] + back})
    return history[-1]["content"]

said = ask("one", "two", "three") + ask("word " * 5000)
said += ask("one", "two", back="swer", stop=["swer", "\\ud800"], max_tokens=10**12)
pathlib.Path("said.txt").write_text("5" + said)
print("done")
raise SystemExit(3)
"""


def score(*, extra: dict[str, Any], completion: str, **_: Any) -> float:
    agent = extra["agent"]
    return agent["exit_code"] + float(agent["files"]["said.txt"][0]) + len(completion)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a record with one batch, of three agents: a function with sub-agents, a command that
    leaves a file, and a function whose calls come at the same time.
    """
    directory = tmp_path_factory.mktemp("record")
    (directory / "agent.py").write_text(_AGENT)
    command = {"command": ["python", "-S", "agent.py"], "files": {"agent.py": str(directory / "agent.py")}}
    scorer = {"kind": "python", "path": SCORER}
    async with staged(says, path=f"{AGENTS}:compacts") as stage:
        first = await stage.play("add", num_samples=2)
    async with staged(says, scorers=[scorer], collect=["*.txt"], **command) as stage:
        second = await stage.play()
        assert second
        assert table_of(second)["reward"].to_pylist() == [3 + 5 + len("done\n")] * 2
        await _rewards_are_those_of_the_files(stage, second)
    async with staged(says, path=f"{AGENTS}:parallel") as stage:
        stage.engine.delay = _reversed(asyncio.Event())
        third = await stage.play("a b")
        assert first and third
    groups = [replace(group, index=index) for index, group in enumerate((first, second, third))]
    with contextlib.closing(Ledger(directory / LEDGER)) as ledger:
        batch = CollectedBatch(table_of(*groups), 0, STAMP, {}, {}, "data", 1, None, to_episodes(groups))
        RunRecord(directory, ledger).record_batch(batch)
        collected = ledger.last(Kind.COLLECTED, 0)
        assert collected and collected["calls_sha256"] == sha256_of(calls_path(directory, 0))
    return directory


def _reversed(last: asyncio.Event) -> Callable[[str], Any]:
    """Lets the first of two branches that come at the same time be answered last."""

    async def delay(text: str) -> None:
        if "branch b" in text:
            last.set()
        elif "branch a" in text:
            await last.wait()

    return delay


async def _rewards_are_those_of_the_files(stage: Stage, group: ScoredGroup) -> None:
    batch, data = Batch(table_of(group), "data", ()), SimpleNamespace(digest="data", prompts=[group.prompt])
    rewards, tokenizer, table = stage.collector._rewards, stage.engine.tokenizer, to_episodes([group])
    assert table
    episodes, data = table.to_pylist(), cast(Any, data)
    assert await replay_rewards(batch, rewards, data, tokenizer, episodes) == (1, [])
    for change, now in (({"exit_code": 0}, 10.0), ({"files": [("said.txt", b"7")]}, 15.0), ({"text": ""}, 8.0)):
        _, differences = await replay_rewards(batch, rewards, data, tokenizer, [episodes[0] | change])
        assert (differences[0].what, differences[0].now) == ("prompt p0 sample 0: reward", repr(now))
    with pytest.raises(NotFound, match="left behind in sample 0"):
        await replay_rewards(batch, rewards, data, tokenizer, [episodes[0] | {"sample": 1}])


def rows_of(directory: Path) -> tuple[Rows, Rows]:
    return tuple(pq.read_table(path(directory, 0)).to_pylist() for path in (batch_path, calls_path))  # type: ignore[return-value]


def test_what_was_asked_is_recorded_once_with_its_answer_and_its_fate(played: Path):
    rows, (function, _, command, parallel) = rows_of(played)
    assert pq.read_table(calls_path(played, 0)).schema == EPISODE_SCHEMA
    statuses = [call["status"] for call in command["calls"]]
    assert statuses == ["stop", "stop", "stop", "context_length_exceeded", "stop", "stop"]
    assert dict(command["files"])["said.txt"].startswith(b"5answer") and command["exit_code"] == 3
    refused = command["calls"][3]
    assert (refused["messages"], refused["tools"]) == ([], None) and not any("word word" in x for x in command["texts"])
    first, *_, last = [said for _, said in requests_of(command)]
    assert first["messages"] == [{"role": "user", "content": "one"}]
    assert (last["stop"], last["max_tokens"], len(last["messages"])) == (["swer", "?"], 2**31 - 1, 3)
    assert [call["parent"] for call in command["calls"]] == [None, 0, 1, None, None, 4], "it has put the stop text back"
    numbers = sorted(
        call["number"] for row in rows if row["sample"] == 0 and row["group"] == 0 for call in row["calls"]
    )
    assert [call["number"] for call in function["calls"]] == numbers
    assert function["calls"][0]["status"] == "tool_calls" and [call["parent"] for call in function["calls"]][:3] == [
        None,
        0,
        1,
    ]
    num_sent = sum(len(call["messages"]) for call in function["calls"])
    assert [call["after"] for call in parallel["calls"]] == [0, 1, 1]
    assert sorted(call["answered"] for call in parallel["calls"]) == [0, 1, 2]  # whichever of the two ends first
    assert len(function["texts"]) < num_sent + len(function["calls"]), "a message that is sent again is not kept again"


def test_the_report_shows_an_episode_as_a_tree_of_calls(played: Path):
    (shown,), left_out = embed([Source(batch_path(played, 0), 1)], make_chat_tokenizer().decode)
    assert not left_out and shown["total"] == len(shown["columns"]["group"]) == 4, "segments are no samples"
    assert histogram([Source(batch_path(played, 0), 1)])["counts"] == {1: [3, 1]}
    function, _, command, parallel = (list(cast(Any, parts)) for parts in shown["columns"]["turns"])
    labels = [(depth, *label.split(" · ")[1:]) for _, _, label, depth in function]
    calls = [
        "call 0",
        "call 1, which continues call 0",
        "call 2, which continues call 1",
        *map("call {}".format, range(3, 7)),
    ]
    assert labels[:-1] == [
        pair
        for number, call in enumerate(calls)
        for pair in ((0, call), (0, f"trained in segment {max(0, number - 2)}"))
    ]
    assert function[0][0].endswith("user\nadd\nassistant\n") and function[1][0].startswith("I add.")
    assert command[-1] == ("done\n", None, "agent · final text, exit code 3", 0)
    branches = [(depth, label.partition(" · ")[2]) for _, reward, label, depth in parallel if reward is None]
    assert [depth for depth, _ in branches] == [0, 1, 0, 0], "one branch is below the call, the other goes on"
    fates = [label for _, reward, label, _ in parallel if reward is not None]
    assert fates == [f"policy · trained in segment {segment}" for segment in (0, 1, 0)]
    rows, _ = rows_of(played)
    masked = [row | {"loss_mask": [False] * len(row["tokens"])} for row in rows[:1]]
    assert {label for _, _, label, _ in _calls(masked, str)} >= {"policy · not trained"}


def test_calls_are_mapped_to_the_recorded_tokens_again(played: Path):
    assert replayed(played, lambda rows, episodes: None) == (7 + 7 + 5 + 3, [])


def replayed(directory: Path, change: Callable[[Rows, Rows], object]) -> tuple[int, list[str]]:
    rows, episodes = rows_of(directory)
    change(rows, episodes)
    schema = pq.read_schema(batch_path(directory, 0))
    environment = {"kind": "agent", "path": "m:run"}
    data = {"train": "x.parquet", "prompts_per_step": 8}
    config = Config.model_validate(
        {"model": "m", "data": data, "environment": environment, "reward": {"scorers": [{"kind": "exact"}]}}
    )
    samples = pa.Table.from_pylist(rows, schema=schema)
    number, differences = replay_calls(samples, episodes, make_chat_tokenizer(), config)
    return number, [f"{one.what}: {one.recorded} -> {one.now}" for one in differences]


def of(rows: Rows, group: int, sample: int, segment: int = 0) -> dict[str, Any]:
    found = [row for row in rows if (row["group"], row["sample"], row.get("segment") or 0) == (group, sample, segment)]
    return found[0]


def edit_text(episode: dict[str, Any], old: str, new: str) -> None:
    episode["texts"] = [text.replace(old, new) for text in episode["texts"]]


def other_parent(episode: dict[str, Any]) -> None:
    episode["calls"][1]["parent"] = None


def other_hash(episode: dict[str, Any]) -> None:
    episode["calls"][1]["sha256"] = "0" * 64


CHANGES: dict[str, tuple[Callable[[Rows, Rows], object], str, str]] = {
    "a message of the agent": (
        lambda rows, episodes: edit_text(of(episodes, 1, 0), "two", "too"),
        "prompt p0 sample 0 call 1: prompt from token ",
        "",
    ),
    "an answer": (
        lambda rows, episodes: edit_text(of(episodes, 0, 0), "I add.", "We add."),
        "prompt p0 sample 0 call 0: answer: ",
        "",
    ),
    "a sampled token": (
        lambda rows, episodes: of(rows, 0, 1)["tokens"].__setitem__(0, 11),
        "prompt p0 sample 1 call 0: answer: ",
        "",
    ),
    "a token of a prompt": (
        lambda rows, episodes: of(rows, 0, 1, 2)["prompt_tokens"].__setitem__(5, 11),
        "sample 1 call 4: prompt from token 5: [11, ",
        "",
    ),
    "a parent": (
        lambda rows, episodes: other_parent(of(episodes, 0, 0)),
        "sample 0 call 1: parent: None -> 0",
        "call 1 of sample 0 of prompt p0 (row 0 of step-000000.parquet) is not that of step-000000.calls.parquet",
    ),
    "a hash": (
        lambda rows, episodes: other_hash(of(episodes, 0, 1)),
        "",
        "call 1 of sample 1 of prompt p0 (row 5 of step-000000.parquet) is not that of step-000000.calls.parquet",
    ),
    "a call of the record": (
        lambda rows, episodes: of(episodes, 1, 0)["calls"].pop(2),
        "prompt p0 sample 0: segments: ",
        "call 2 of sample 0 of prompt p0 (row 10 of step-000000.parquet) is not that of step-000000.calls.parquet",
    ),
    "a segment": (
        lambda rows, episodes: rows.remove(of(rows, 0, 1, 3)),
        "sample 1 call 5: rows: none",
        "call 5 of sample 1 of prompt p0 in step-000000.calls.parquet was answered and is in no row of",
    ),
    "an episode": (
        lambda rows, episodes: episodes.remove(of(episodes, 0, 1)),
        "",
        "call 0 of sample 1 of prompt p0 (row 5 of step-000000.parquet) is not that of",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_thing_that_differs_is_named(played: Path, tmp_path: Path, change: str):
    apply, replays, verifies = CHANGES[change]
    _, differences = replayed(played, apply)
    assert (len(differences), replays in "".join(differences)) == (bool(replays), True), differences
    rows, episodes = rows_of(played)
    apply(rows, episodes)
    (tmp_path / "batches").mkdir()
    for path, content in ((batch_path, rows), (calls_path, episodes)):
        pq.write_table(pa.Table.from_pylist(content, schema=pq.read_schema(path(played, 0))), path(tmp_path, 0))
    wrong = list(check_calls(batch_path(tmp_path, 0), calls_path(tmp_path, 0)))
    assert verifies in "".join(wrong[:1]) and bool(wrong) == bool(verifies), wrong
