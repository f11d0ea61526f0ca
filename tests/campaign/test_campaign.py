"""A few episodes of the campaign, each a fault that has broken a run before, and that it notices what is wrong."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.campaign.__main__ import warm
from tests.campaign.cluster import Cluster
from tests.campaign.episode import Baseline, Episode, Plan, Result, make_plan
from tests.campaign.faults.all import FAULTS
from tests.campaign.table import load, save, table
from tests.campaign.workspace import LEASE_S, write_config
from tests.support import PATIENCE_S

_LATE = "coordinator.finished.end"
Warm = tuple[Cluster, Mapping[str, Baseline], Path]


@pytest_asyncio.fixture(scope="module")
async def toys(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Warm]:
    directory = tmp_path_factory.mktemp("campaign")
    async with warm(directory, ["whole"]) as (cluster, baselines):
        yield cluster, baselines, directory


@pytest.mark.parametrize(
    ("fault", "victim", "event", "outcomes"),
    [
        # The batch was sent and is not recorded as trained on: its step must get its row, line and checkpoint.
        ("kill", "coordinator", "trainer.Train.end", ["killed", "done"]),
        pytest.param("kill", "rank-1", "trainer.SaveCheckpoint.begin", None, marks=pytest.mark.long),
        ("reset", "trainer", "trainer.Train.begin", ["done"]),
        ("forged-answers", "ranks", "trainer.Train.begin", ["done"]),
        # Open files cannot be written either, also by the session after the one in which it began.
        pytest.param(
            *("read-only-disk", "resumed", "trainer.Train.begin", ["STORAGE_FAILED", "STORAGE_FAILED", "done"]),
            marks=pytest.mark.long,
        ),
    ],
)
async def test_a_run_survives_or_resumes_exactly(
    fault: str, victim: str, event: str, outcomes: list[str] | None, toys: Warm
) -> None:
    cluster, baselines, directory = toys
    result = Result(0, Plan("whole", fault, victim, event, 1))
    played = Episode(cluster, directory / "episode", directory, result)
    await played.run(baselines["whole"])
    assert result.injected
    assert result.violations == []
    assert result.outcomes[-1] == "done"
    assert outcomes in (None, result.outcomes)
    assert fault != "read-only-disk" or {"ledger.sqlite", "ledger.lock", "history"} <= {*result.refused}
    if fault == "reset":
        wrong = Result(1, result.plan, result.injected)
        wrong.violations = played._wrong(replace(baselines["whole"], weights=b"others"))
        assert wrong.violations == ["the weights are not those of the undisturbed run"]
        save(directory / "saved.json", {"episodes": 2}, [result.row(), wrong.row()])
        assert load(directory / "saved.json") == [result.row(), wrong.row()]
        assert f"| {fault} | 2 |" in table(load(directory / "saved.json"))


async def test_services_close_a_run_whose_coordinator_never_comes_back(toys: Warm) -> None:
    cluster, _, directory = toys
    workspace = directory / "left"
    workspace.mkdir()
    write_config(workspace, directory, "whole")
    config = workspace / "run.yaml"
    config.write_text(config.read_text().replace(f"lease_s: {LEASE_S}", "lease_s: 5.0"))
    episode = Episode(cluster, workspace, directory, Result(0, Plan("whole", "kill", "coordinator", _LATE, 0)))
    await cluster.until_ready()
    assert await episode._session(with_fault=True) == "killed"
    assert len(await cluster.open_runs()) == 4
    async with asyncio.timeout(PATIENCE_S):
        while await cluster.open_runs() or cluster.engines():
            await asyncio.sleep(0.1)


def test_the_plan_follows_from_seed_and_number() -> None:
    baselines = {
        name: Baseline(b"", [], {"trainer.Train.begin": 6, "reward.Score.end": 9}, 1.0)
        for name in ("whole", "streamed", "lagged", "colocated", "episodes")
    }
    plans = [make_plan(3, number, [*FAULTS], baselines) for number in range(400)]
    assert plans == [make_plan(3, number, [*FAULTS], baselines) for number in range(400)]
    assert {plan.fault for plan in plans} == {*FAULTS}
