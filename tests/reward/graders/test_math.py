"""Tests the math grader with hostile texts: nothing is executed, no worker exceeds its limit, valid answers score."""

from pathlib import Path

import pytest
import pytest_asyncio

from services.common.tasks import gather
from services.reward.scoring import Outcome, ScoringRun
from tests.reward.hostile_math import ANSWERED, CODE_AROUND_A_NUMBER, ENDLESS
from tests.support import LIMITS_S, cpu_seconds

TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def canaries(tmp_path_factory) -> Path:
    """Provides the folder in which a text that ran would leave a file, also the working directory of the workers."""
    return tmp_path_factory.mktemp("canaries")


@pytest_asyncio.fixture(scope="module")
async def runs(open_run, canaries):
    """Yields two runs of one worker each, so that no text waits for the worker of another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(canaries)
        async with open_run({"kind": "math"}, num_workers=1) as one, open_run({"kind": "math"}, num_workers=1) as other:
            yield one, other


@pytest_asyncio.fixture(scope="module")
async def patient(open_run, canaries):
    """Yields a run with one worker and all the time that a busy machine may take.

    Its tests limit the worker's CPU time instead.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(canaries)
        async with open_run({"kind": "math"}, num_workers=1) as run:
            yield run


@pytest.fixture(scope="module")
def to_item(make_item, canaries):
    return lambda text: make_item(text.replace("CANARY", str(canaries / "absolute")), "5")


def cpu_s(run: ScoringRun) -> float:
    """Returns the CPU time, in seconds, of the workers of `run`."""
    return sum(cpu_seconds(worker.pid) for worker in run._scorers[0]._pool._workers)


def test_the_corpus_is_large():
    assert len(set(ANSWERED + ENDLESS + CODE_AROUND_A_NUMBER)) >= 90


@pytest.mark.parametrize("kind", ["wrong", "around a number"])
async def test_nothing_of_a_hostile_text_runs_or_takes_long(patient, make_item, to_item, canaries, kind):
    texts = ANSWERED if kind == "wrong" else CODE_AROUND_A_NUMBER
    outcomes = {}
    for text in texts:
        begin_s = cpu_s(patient)
        (outcomes[text],) = await patient.score([to_item(text)])
        assert cpu_s(patient) - begin_s < TIMEOUT_S, text[:80]
        honest = await patient.score([make_item(rf"\boxed{{\frac{{{n}}}{{2}}}}", "2.5") for n in (5, 6)])
        assert [outcome.components for outcome in honest] == [{"math": 1.0}, {"math": 0.0}], text[:80]
    scores = (0.0,) if kind == "wrong" else (0.0, 1.0)
    assert [(t[:80], o) for t, o in outcomes.items() if o.components.get("math") not in scores] == []
    assert list(canaries.iterdir()) == []


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
async def test_endless_texts_are_wrong_and_end_in_time_and_the_next_samples_are_right(
    runs, make_item, to_item, canaries, hurried, every
):
    honest = [make_item(rf"\boxed{{{n}}}", "5") for n in (5, 6)]

    async def one_by_one(run: ScoringRun, texts: list[str]) -> list[tuple[str, Outcome]]:
        outcomes = []
        for text in texts:
            for limit_s in LIMITS_S:  # on a busy machine even the dataset's answer may take a second
                with hurried(run._scorers[0]._pool, limit_s):
                    (outcome,) = await run.score([to_item(text)])
                if not outcome.failure:
                    break
            outcomes.append((text[:80], outcome))
            followers = await run.score(honest)
            assert [outcome.components for outcome in followers] == [{"math": 1.0}, {"math": 0.0}], text[:80]
        return outcomes

    halves = await gather(one_by_one(run, ENDLESS[::every][half::2]) for half, run in enumerate(runs))
    outcomes = [(text, outcome.components, outcome.failure) for half in halves for text, outcome in half]
    assert outcomes == [(text, {"math": 0.0}, None) for text, *_ in outcomes]
    assert list(canaries.iterdir()) == []
