"""Tests that a run that resumes with an edited reward or environment says so."""

import asyncio
import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lockstep.reward.v1 import reward_pb2
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.config.evaluation import EvalSetConfig, EvaluationConfig
from services.common.config.run import Config
from services.common.rpc.transfer import seal
from services.coordinator.observe.console import literal_console
from services.coordinator.observe.frontend import Outcome, show
from services.coordinator.observe.report.summary import head
from services.coordinator.rl import step
from services.coordinator.rl.evaluation import evaluate
from services.coordinator.runs.checkpoints import change_between, comparable_evaluations, warn_of_other_versions
from services.coordinator.runs.reader import LedgerReader
from services.coordinator.runs.record import batch_path
from services.coordinator.runs.resume import open_run
from services.coordinator.runs.run import Run
from tests.coordinator.fake_services import FakeReward, collector, make_config, make_prompt, replicas
from tests.coordinator.fake_steps import steps


def make_config_of(batch: Path) -> Config:
    """Returns the config of the run that a batch is of."""
    data = {"train": "x.parquet", "prompts_per_step": 2}
    return make_config(runs_dir=batch.parents[2], data=data, rollout={"completions_per_prompt": 2}, num_steps=4)


@pytest.fixture
async def newest(tmp_path: Path) -> Path:
    """Returns the newest batch of a run of two steps."""
    config = make_config_of(tmp_path / "run" / "batches" / "x")
    async with steps(config, 4, lambda prompt_id, token: float(token % 2)) as given:
        await given.live(0, 2)
    run = Run(config, open_run(config))
    newest = run.record.newest_batch()
    run.close()
    assert newest == batch_path(config.run_dir, 1)
    return newest


def test_only_what_changed_is_named_with_both_versions(newest: Path, caplog: pytest.LogCaptureFixture):
    warn_of_other_versions(newest, "fake 1", "")
    assert caplog.messages == []
    warn_of_other_versions(newest, "fake 2", "python 1/b")
    scorer, environment = caplog.messages
    assert scorer == "scorer fake 2 was fake 1 in the newest batch of this run: rewards may differ"
    assert environment.startswith("environment python 1/b was ")


@pytest.mark.parametrize(
    ("scorer", "environment", "trainer_has", "is_used"),
    [("fake 1", "", 1, True), ("fake 2", "", 1, False), ("fake 2", "", 2, True), ("fake 1", "python 1/b", 1, True)],
)
async def test_a_recorded_batch_of_another_scorer_is_sampled_again_unless_it_is_applied(
    newest: Path, monkeypatch: pytest.MonkeyPatch, scorer: str, environment: str, trainer_has: int, is_used: bool
):
    async def collect(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(step, "collect", collect)
    monkeypatch.setattr(step, "streams", lambda _: False)
    run = Run(config := make_config_of(newest), open_run(config))
    trainer = SimpleNamespace(opened=SimpleNamespace(version=trainer_has))
    context: Any = SimpleNamespace(trainer=trainer, versions={"scorer": scorer, "environment": environment})
    with contextlib.closing(run), contextlib.nullcontext() if is_used else pytest.raises(NotImplementedError):
        batch = await step.sample(run, context, run.record.recorded_stamp(1), 1, asyncio.TaskGroup())
        assert set(batch.samples["scorer"].to_pylist()) == {"fake 1"}


def test_a_change_since_an_evaluation_is_named_too(newest: Path, caplog: pytest.LogCaptureFixture):
    evaluated = {"scorer": "fake 1 + python 1/a", "environment": "e 1"}
    warn_of_other_versions(None, "fake 1 + python 1/b", "e 2", evaluated)
    assert caplog.messages == [
        "scorer python 1/b was python 1/a in the newest evaluation of this run: rewards may differ",
        "environment e 2 was e 1 in the newest evaluation of this run: rewards may differ",
    ]
    caplog.clear()
    warn_of_other_versions(newest, "fake 2", "", {"scorer": "fake 1", "environment": ""})
    assert len(caplog.messages) == 1, "the batch has said it"


class Scorer(FakeReward):
    def __init__(self, version: str):
        super().__init__(set())
        self.version = version

    async def OpenRun(self, request: Any, context: Any) -> reward_pb2.OpenRunResponse:
        return reward_pb2.OpenRunResponse(scorer=self.version)

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        scores = [reward_pb2.Score(reward=1.0) for _ in request.candidates]
        return seal(request, reward_pb2.ScoreResponse(scores=scores, scorer=self.version))


async def test_an_outcome_says_that_its_numbers_were_scored_differently(tmp_path: Path):
    """The first numbers of a run are those before training. A run that goes on with another reward has other ones."""
    config = make_config(runs_dir=tmp_path, data={"train": "x", "eval": {"test": "y"}, "prompts_per_step": 8})
    shown: list[str] = []
    for version, scorer in enumerate(("fake 1", "fake 1", "fake 2")):
        stamp = PolicyStamp(version=version, digest="d")
        with contextlib.closing(Run(config, open_run(config))) as run:
            run.begin(version, [])
            async with replicas(1) as fakes, collector(config, fakes, Scorer(scorer), stamp) as collects:
                await evaluate(run, collects, {"test": [make_prompt(0)]}, stamp)
            output = io.StringIO()
            show(Outcome.of(run, version, 3, None), {}, literal_console(file=output, width=80), number=".2f")
            shown.append(output.getvalue())
    # The same weights, sampled otherwise.
    other = config.model_copy(update={"evaluation": EvaluationConfig(sets={"test": EvalSetConfig(temperature=1.0)})})
    with contextlib.closing(Run(other, open_run(other))) as run:
        run.begin(2, [])
        async with replicas(1) as fakes, collector(other, fakes, Scorer("fake 2"), stamp) as collects:
            await evaluate(run, collects, {"test": [make_prompt(0)]}, stamp)
        change = change_between(run.record.ledger, 1, 2)
        assert change.startswith("evaluation.sets.test ") and change.endswith(", scorer fake 1 became fake 2")
        assert len(comparable_evaluations(run.record.ledger, 2)) == 1
    said = "These columns cannot be compared, they were scored differently: scorer fake 1 became fake 2."
    assert [said in text for text in shown] == [False, False, True]
    with contextlib.closing(LedgerReader(config.run_dir)) as ledger:
        facts = dict(head(config.run_dir, ledger, [])["facts"])
    assert facts["held-out"].endswith("scorer fake 1 became fake 2") and ", not to be compared: " in facts["held-out"]


def test_a_run_without_batches_or_with_a_damaged_one_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    for batch in (None, tmp_path / "none.parquet", tmp_path / "damaged.parquet"):
        warn_of_other_versions(batch, "fake 1", "")
    assert caplog.messages == []
