"""Tests that the best checkpoint is kept, and that a run that stops improving ends; both follow from the ledger."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from lockstep.coordinator.v1 import coordinator_pb2 as pb

from services.common.errors import InvalidInput
from services.coordinator.daemon.history import read_run
from services.coordinator.observe.frontend import Outcome
from services.coordinator.observe.report.summary import head
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.reader import LedgerReader
from services.coordinator.runs.resume import open_run
from services.coordinator.runs.run import Run
from tests.coordinator.fake_services import make_config
from tests.coordinator.runs.test_checkpoints import DIRECTORIES, FakeTrainer

METRIC = "eval/test/reward"
Open = Callable[..., Run]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the run, which may be open; with other settings of its checkpoints and evaluations."""
    runs: list[Run] = []

    def opening(version: int = 0, *, early_stopping: Any = None, **checkpoint: Any) -> Run:
        if runs:
            runs.pop().close()
        config = make_config(
            name="run",
            runs_dir=tmp_path,
            num_steps=100,
            checkpoint={"save_freq": 1, "max_ckpts_to_keep": 1, **checkpoint},
            evaluation={"eval_freq": 1, "early_stopping": early_stopping},
            data={"train": "a.parquet", "eval": {"test": "b.parquet"}, "prompts_per_step": 2},
        )
        runs.append(Run(config, open_run(config)))
        runs[0].begin(version, [])
        return runs[0]

    yield opening
    for run in runs:
        run.close()


async def step(run: Run, value: float | None, *, models: tuple[FakeTrainer, ...] = ()) -> None:
    """Finishes a step, saves it, and evaluates it unless `value` is None."""
    run.finish_step(run.version + 1, {})
    for model in models:
        model.ends.put_nowait(None)
    await run.checkpoints.begin(models, run.version)
    await run.checkpoints.finish()
    if value is not None:
        run.finish_evaluation(run.version, {METRIC: value, "eval/test/tokens_mean": 1.0})


def test_a_run_warns_once_of_a_learning_rate_of_0(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    run = opened()
    for version, rate in enumerate((1e-6, 0.0, 0.0), 1):
        run.finish_step(version, {"train/lr": rate})
    assert [bool(row.get("warning/learning_rate_is_0")) for row in run.record.ledger.all(Kind.FINISHED)] == [0, 1, 1]
    assert [message for message in caplog.messages if "the learning rate is 0" in message] == [
        "step 2: the learning rate is 0 from here on, so nothing is learned: stop the run, or resume a checkpoint "
        "under another name, with larger trainer.optim.decay_steps or trainer.optim.min_lr_ratio"
    ]


def kept(run: Run, name: str = "checkpoints") -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run.config.run_dir / name).iterdir())


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("max", [0.1, 0.9, 0.5, 0.9], [2, 4]),
        ("min", [0.1, 0.9, 0.5, 0.7], [1, 4]),
        ("max", [0.1, 0.9, float("nan"), 0.95, 0.1], [4, 5]),
        ("max", [float("nan"), float("nan")], [2]),
    ],
)
async def test_the_best_is_kept_beside_the_newest(
    opened: Open, mode: str, values: list[float], expected: list[int]
) -> None:
    run, critic, trainer = opened(keep_best={"metric": METRIC, "mode": mode}), FakeTrainer("critic"), FakeTrainer()
    for value in values:
        await step(run, value, models=(critic, trainer))
    assert [kept(run, name) for name in DIRECTORIES] == [expected, expected]


async def test_without_the_key_the_newest_is_kept(opened: Open) -> None:
    run, trainer = opened(), FakeTrainer()
    for value in (0.9, 0.1, 0.2):
        await step(run, value, models=(trainer,))
    assert kept(run) == [3] and run.checkpoints.best() is None


async def test_evaluations_of_weights_that_the_run_has_left_do_not_count(opened: Open) -> None:
    run, trainer = opened(keep_best=METRIC, max_ckpts_to_keep=9), FakeTrainer()
    for value in (0.5, 0.9, 0.1):
        await step(run, value, models=(trainer,))
    run.begin(1, [])  # it goes back to step 1
    await step(run, None, models=(trainer,))  # step 2 has other weights now
    best = run.checkpoints.best()
    assert best and best["version"] == 1
    run.finish_evaluation(2, {METRIC: 0.6})
    best = run.checkpoints.best()
    assert best and (best["version"], best[METRIC]) == (2, 0.6)


@pytest.mark.parametrize(("values", "is_start_better"), [((0.9, 0.5, 0.4), True), ((0.1, 0.5, 0.9), False)])
async def test_the_outcome_says_if_the_starting_model_was_better(
    opened: Open, values: tuple[float, ...], is_start_better: bool
) -> None:
    run, trainer = opened(keep_best=METRIC), FakeTrainer()
    run.finish_evaluation(0, {METRIC: values[0]})
    for value in values[1:]:
        await step(run, value, models=(trainer,))
    assert Outcome.of(run, run.version, run.num_steps, None).is_start_better is is_start_better


async def test_evaluations_by_other_scorers_do_not_count(opened: Open) -> None:
    run, trainer = opened(keep_best=METRIC, max_ckpts_to_keep=9), FakeTrainer()
    for scorer, value, expected in (("a", 0.9, 1), ("b", 0.5, 2), ("b", 0.6, 3), ("b", 0.4, 3), ("a", 0.8, 1)):
        await step(run, None, models=(trainer,))
        run.finish_evaluation(run.version, {METRIC: value}, {"scorer": scorer, "environment": ""})
        best = run.checkpoints.best()
        assert best and best["version"] == expected


@pytest.mark.parametrize(
    ("settings", "values", "last"),
    [
        ({"patience": 2}, [0.1, 0.5, 0.4, 0.5], 4),
        ({"patience": 2}, [0.1, 0.5, 0.4, 0.6, 0.7], None),
        ({"patience": 1, "mode": "min"}, [0.5, 0.4, 0.4], 3),
        ({"patience": 2, "min_delta": 0.1}, [0.1, 0.15, 0.19], 3),
        ({"patience": 2, "min_delta": 0.1}, [0.1, 0.15, 0.25, 0.3], None),
        ({"patience": 2, "min_delta": 0.1}, [0.7, 0.8, 0.8], 3),  # 0.7 + 0.1 is a little less than 0.8
        ({"patience": 2}, [0.3, 0.1 + 0.2, 0.3], 3),
        ({"patience": 1}, [float("nan"), float("nan"), 0.1, float("nan")], 4),
    ],
)
async def test_a_run_ends_when_it_gets_no_better(
    opened: Open, settings: dict[str, Any], values: list[float], last: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    run = opened(early_stopping={"metric": METRIC, **settings})
    for value in values:
        assert run.version < run.num_steps
        await step(run, value)
    assert (run.num_steps, run.is_stalled) == (last or 100, last is not None)
    stopped = run.record.ledger.all(Kind.STOPPED)
    assert [row["version"] for row in stopped] == ([last] if last else [])
    assert ("early stopping after step" in caplog.text) == (last is not None)


async def test_it_has_ended_when_it_is_opened_again_unless_the_config_says_otherwise(opened: Open) -> None:
    early = {"metric": METRIC, "patience": 1}
    run = opened(early_stopping=early)
    for value in (0.5, 0.4):
        await step(run, value)
    run = opened(2, early_stopping=early)
    assert (run.num_steps, len(run.record.ledger.all(Kind.STOPPED))) == (2, 1)
    (stopped,) = run.record.ledger.all(Kind.STOPPED)
    expected = {"version": 2, "metric": METRIC, "value": 0.4, "best_version": 1, "best_value": 0.5}
    assert stopped == expected
    assert opened(2, early_stopping=early | {"patience": 2}).num_steps == 100
    assert opened(2).num_steps == 100


@pytest.mark.parametrize(("save_freq", "saved"), [(1, [3]), (4, [3]), (0, [])])
async def test_the_last_step_is_saved(opened: Open, save_freq: int, saved: list[int]) -> None:
    run, trainer = opened(early_stopping={"metric": METRIC, "patience": 1}, save_freq=save_freq), FakeTrainer()
    for value in (0.5, 0.6, 0.4):
        run.finish_step(run.version + 1, {})
        run.finish_evaluation(run.version, {METRIC: value})
    trainer.ends.put_nowait(None)
    await run.end_checkpoints([trainer])
    assert trainer.saving == saved
    assert Outcome(run.config.run_dir, run.version, run.num_steps, [], None).num_steps == 3  # it is complete


@pytest.mark.parametrize("key", ["keep_best", "early_stopping"])
async def test_a_metric_that_no_evaluation_has_is_named(opened: Open, key: str) -> None:
    run = opened(**{key: "eval/test/failed"})  # is there only if a sample has failed
    with pytest.raises(InvalidInput, match=f"{key}.metric: there is no metric eval/test/failed, only eval/test/reward"):
        run.finish_evaluation(0, {METRIC: 0.5})
    assert not run.record.ledger.all(Kind.EVALUATED)


def test_a_run_of_another_user_is_listed_with_the_others(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    run = opened()
    monkeypatch.setattr(Path, "is_file", refused)  # root may read everything
    listed = read_run(run.config.run_dir)
    assert listed and listed.state == pb.RUN_STATE_FAILED and "another user" in listed.error


@pytest.mark.parametrize("patience", [1, 9])
async def test_a_run_that_ended_early_is_shown_as_done(opened: Open, patience: int) -> None:
    run = opened(early_stopping={"metric": METRIC, "patience": patience})
    for value in (0.5, 0.4):
        await step(run, value)
    lines = [{"step": version, "time/step_s": 1.0, METRIC: 0.5} for version in (1, 2)]
    (run.config.run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run.close()
    with closing(LedgerReader(run.config.run_dir)) as ledger:
        shown = head(run.config.run_dir, ledger, lines)
    listed = read_run(run.config.run_dir)
    assert listed
    why = dict(shown["facts"]).get("early stopping")
    if patience == 1:
        assert (shown["state"], why) == ("done", "eval/test/reward was best after step 1, with 0.5")
        assert (listed.state, listed.version, listed.num_steps) == (pb.RUN_STATE_FINISHED, 2, 2)
    else:
        assert (shown["state"], why) == ("stopped", None)
        assert (listed.state, listed.num_steps) == (pb.RUN_STATE_STOPPED, 100)
