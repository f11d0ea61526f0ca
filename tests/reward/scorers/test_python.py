"""Tests the scorer that calls the user's function, with a worker that survives whatever the function does."""

import asyncio
import os
import signal

import pytest

from services.common.errors import InvalidInput
from services.reward.errors import FailureReason
from tests.support import LIMITS_S, PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("functions")


def scorer(function: str, **fields: object) -> dict:
    return {"kind": "python", "path": f"reward_functions:{function}", **fields}


async def test_it_gets_every_field_of_the_item(open_run, make_item):
    async with open_run(scorer("with_bonus", kwargs={"bonus": 0.5}), num_workers=1) as run:
        outcomes = await run.score([make_item("4", "4", extra={"level": 3}), make_item("5", "4", extra={"level": 3})])
    assert [outcome.reward for outcome in outcomes] == [1.5, 0.5]


async def test_weights_names_and_versions(open_run, make_item):
    scorers = [scorer("slowly", name="size", weight=0.5), {"kind": "exact", "weight": 2}, scorer("slowly", weight=0)]
    async with open_run(*scorers, num_workers=1) as run:
        (outcome,) = await run.score([make_item("abcd", "abcd")])
        described = run.scorer
    assert outcome.reward == 0.5 * 4 + 2 * 1 + 0 * 4
    assert outcome.components == {"size": 4.0, "exact": 1.0, "python": 4.0}
    digest = described.split()[1]
    assert len(digest) == 12
    assert described == f"size {digest} x 0.5 + exact 2 x 2 + python {digest} x 0"


async def test_a_scorer_that_only_records_fails_no_sample(open_run, make_item, caplog):
    async with open_run(scorer("raises", weight=0), {"kind": "exact"}) as run:
        right, wrong = await run.score([make_item("a", "a"), make_item("b", "a")])
    assert (right.failure, right.reward, wrong.failure, wrong.reward) == (None, 1.0, None, 0.0)
    assert right.components == {"exact": 1.0}
    assert "scorer python, whose weight is 0, failed: KeyError: 'column'" in caplog.text


async def test_what_numpy_returns_is_a_number(open_run, make_item):
    async with open_run(scorer("close_to")) as run:
        outcomes = await run.score([make_item("1", "1"), make_item("2", "1")])
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("raises", FailureReason.ERROR, "KeyError: 'column'"),
        ("stops_to_debug", FailureReason.ERROR, "a worker has no terminal"),
        ("not_a_number", FailureReason.ERROR, "finite number, not nan"),
        pytest.param("text", FailureReason.ERROR, "finite number, not '1.0'", marks=pytest.mark.long),
        pytest.param("exits", FailureReason.CRASHED, "exit code 3", marks=pytest.mark.long),
        ("exits_while_answering", FailureReason.CRASHED, "exit code 3"),
        pytest.param("answers_nonsense", FailureReason.CRASHED, "not JSON", marks=pytest.mark.long),
        ("answers_for_ever", FailureReason.CRASHED, "more than 16777216 bytes"),
        ("takes_memory", FailureReason.CRASHED, "exit code 1: out of memory (reward.max_memory_gib)"),
        pytest.param("leaves", FailureReason.CRASHED, "exit code 1: sys.exit(no such column)", marks=pytest.mark.long),
        (
            "nothing",
            FailureReason.ERROR,
            "reward_functions:nothing: a score must be a finite number, not None: return 0",
        ),
        ("hangs", FailureReason.TIMEOUT, "within 0.5 s (timeout_s)"),
    ],
)
async def test_a_bad_function_is_a_typed_failure_each_time(open_run, make_item, name, reason, words):
    timeout_s = 0.5 if reason is FailureReason.TIMEOUT else PATIENCE_S
    async with open_run(scorer(name), {"kind": "exact"}, timeout_s=timeout_s, num_workers=1) as run:
        outcomes = await run.score([make_item("a", "a"), make_item("b", "a")])
    assert [outcome.failure.reason for outcome in outcomes] == [reason] * 2
    assert all(words in outcome.failure.detail and outcome.failed_scorer == "python" for outcome in outcomes)
    assert [outcome.components for outcome in outcomes] == [{"exact": 1.0}, {"exact": 0.0}]
    assert [outcome.reward for outcome in outcomes] == [0.0, 0.0]


async def test_a_function_that_does_not_take_the_arguments_is_refused_at_open(open_run):
    message = r"scorers\.0 .*two_arguments is called with \(prompt=\.\.\., .* \(prompt, completion\): .*'answer'"
    for settings in ({}, {"group": True}):
        with pytest.raises(InvalidInput, match=message):
            async with open_run(scorer("two_arguments", **settings)):
                pass
    with pytest.raises(InvalidInput, match="unexpected keyword argument 'bonuss'"):
        async with open_run(scorer("with_bonus", kwargs={"bonuss": 1})):
            pass


@pytest.mark.parametrize(
    ("path", "words"),
    [("no_such:f", "No module named"), ("reward_functions:no_such", "no attribute"), ("os:sep", "not a function")],
)
async def test_a_path_that_leads_nowhere_is_refused_at_open(open_run, path, words):
    with pytest.raises(InvalidInput, match=rf"reward\.scorers\.1 \(python\) cannot start.*{words}"):
        async with open_run({"kind": "exact"}, {"kind": "python", "path": path}):
            pass


@pytest.fixture
def hang(make_item, tmp_path):
    """Returns a sample on which by_completion never ends."""
    return make_item("hang", extra={"hanging": str(tmp_path)})


@pytest.fixture
def until_hanging(tmp_path):
    """Returns a function that waits until so many workers have begun such a sample."""
    return lambda num_workers: until(lambda: len(list(tmp_path.iterdir())) == num_workers)


@pytest.mark.parametrize("name", [pytest.param("dies_once", marks=pytest.mark.long), "dies_once_async"])
async def test_a_sample_whose_worker_dies_is_scored_once_more(open_run, make_item, tmp_path, name):
    items = [make_item(str(number), extra={"died": str(tmp_path)}) for number in range(5)]
    async with open_run(scorer(name), num_workers=2) as run:
        outcomes = await run.score(items)
        assert [(outcome.reward, outcome.failure) for outcome in outcomes] == [(number, None) for number in range(5)]
    async with open_run(scorer("dies_once", group=True), num_workers=1) as run:
        items = [make_item(f"1{number}", extra={"died": str(tmp_path)}) for number in range(5)]
        assert [outcome.reward for outcome in await run.score(items)] == [10.0, 11.0, 12.0, 13.0, 14.0]


async def test_samples_of_an_async_function_are_scored_at_once_in_order(open_run, make_item):
    """Each waits until 64 of them are in progress, in groups of four as a run sends them."""
    groups = [[make_item(str(4 * group + i), extra={"together": 64}) for i in range(4)] for group in range(16)]
    async with open_run(scorer("all_at_once"), num_workers=1) as run:
        outcomes = await asyncio.gather(*(run.score(items) for items in groups))
    assert [outcome.reward for group in outcomes for outcome in group] == list(range(64))


async def test_async_samples_fail_alone(open_run, make_item, hurried):
    texts = ["raise", "3", "wait", "4", "raise", "cancel", "panic"]
    async with open_run(scorer("all_at_once"), num_workers=1) as run:
        pids = [worker.pid for worker in run._scorers[0]._pool._workers]
        for limit_s in LIMITS_S:
            with hurried(run._scorers[0]._pool, limit_s):
                outcomes = await run.score([make_item(text, extra={"together": 2}) for text in texts])
            if [outcome.reward for outcome in outcomes] == [0, 3, 0, 4, 0, 0, 0]:
                break
        assert [outcome.failure and outcome.failure.reason for outcome in outcomes] == [
            FailureReason.ERROR, None, FailureReason.TIMEOUT, None, *[FailureReason.ERROR] * 3
        ]  # fmt: skip
        assert [worker.pid for worker in run._scorers[0]._pool._workers] == pids, "no worker had to be killed"


@pytest.mark.parametrize(("bad", "reason"), [("block", FailureReason.TIMEOUT), ("exit", FailureReason.CRASHED)])
async def test_an_async_sample_that_ends_its_worker_costs_no_other(open_run, make_item, hurried, bad, reason):
    texts = ["1", bad, "2", "3"]
    async with open_run(scorer("all_at_once"), num_workers=1) as run:
        for limit_s in LIMITS_S:
            with hurried(run._scorers[0]._pool, limit_s):
                outcomes = await run.score([make_item(text, extra={"together": 1}) for text in texts])
            if [outcome.reward for outcome in outcomes] == [1, 0, 2, 3]:
                break
        assert [outcome.failure and outcome.failure.reason for outcome in outcomes] == [None, reason, None, None]


async def test_calls_of_an_async_function_are_limited(open_run, make_item):
    items = [make_item(str(number), extra={"together": 2}) for number in range(6)]
    async with open_run(scorer("all_at_once", max_concurrent=2), num_workers=1) as run:
        assert [outcome.reward for outcome in await run.score(items)] == list(range(6))


async def test_the_limit_of_an_async_function_is_that_of_all_workers_together(open_run, make_item, monkeypatch):
    async with open_run(scorer("slowly", max_concurrent=3), num_workers=2) as run:
        pool, running, numbers = run._scorers[0]._pool, set(), []

        async def send(worker, message, limit_s, send=pool._send):
            running.add(id(message))
            numbers.append(len(running))
            try:
                return await send(worker, message, limit_s)
            finally:
                running.remove(id(message))

        monkeypatch.setattr(pool, "_send", send)
        assert {outcome.reward for outcome in await run.score([make_item("12")] * 8)} == {2}
        assert (len(numbers), max(numbers)) == (8, 3)


async def test_a_killed_worker_is_a_crash_and_the_next_sample_is_scored(open_run, make_item, hang, until_hanging):
    async with open_run(scorer("by_completion"), num_workers=1) as run:
        (pid,) = [worker.pid for worker in run._scorers[0]._pool._workers]
        scoring = asyncio.create_task(run.score([hang, make_item("2.5")]))
        await until_hanging(1)
        os.kill(pid, signal.SIGKILL)
        await until_hanging(2)  # it is tried once more
        os.kill(run._scorers[0]._pool._workers[0].pid, signal.SIGKILL)
        crashed, scored = await scoring
        assert crashed.failure.reason is FailureReason.CRASHED
        assert crashed.failure.detail == "worker died with exit code -9"
        assert (scored.reward, scored.failure) == (2.5, None)
        assert [worker.pid for worker in run._scorers[0]._pool._workers] != [pid]


async def test_a_worker_killed_while_idle_costs_no_sample(open_run, make_item, gone):
    async with open_run(scorer("by_completion"), num_workers=1) as run:
        pids = [worker.pid for worker in run._scorers[0]._pool._workers]
        os.kill(pids[0], signal.SIGKILL)
        assert await gone(pids)
        await run._scorers[0]._pool._workers[0]._process.wait()
        (outcome,) = await run.score([make_item("2.5")])
    assert outcome.reward == 2.5


async def cancel(scoring):
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


async def test_a_cancelled_call_ends_by_itself_and_leaves_its_worker_loaded(
    open_run, make_item, tmp_path_factory, until_hanging, hang
):
    pipe = tmp_path_factory.mktemp("pipe") / "until"
    os.mkfifo(pipe)
    async with open_run(scorer("by_completion"), num_workers=1) as run:
        pids = [worker.pid for worker in run._scorers[0]._pool._workers]
        scoring = asyncio.create_task(run.score([make_item("hang", extra=hang.extra | {"until": str(pipe)})]))
        await until_hanging(1)
        await cancel(scoring)
        next_score = asyncio.create_task(run.score([make_item("2.5")]))
        await asyncio.to_thread(pipe.write_text, "1")
        (outcome,) = await next_score
        assert [worker.pid for worker in run._scorers[0]._pool._workers] == pids
    assert outcome.reward == 2.5


async def test_a_cancelled_call_that_does_not_end_frees_its_worker_at_its_limit(
    open_run, make_item, gone, hurried, hang, until_hanging
):
    async with open_run(scorer("by_completion"), num_workers=1) as run:
        pids = [worker.pid for worker in run._scorers[0]._pool._workers]
        with hurried(run._scorers[0]._pool, 5.0):
            scoring = asyncio.create_task(run.score([hang]))
            await until_hanging(1)
        await cancel(scoring)
        (outcome,) = await run.score([make_item("2.5")])
        assert await gone(pids)
    assert outcome.reward == 2.5


async def test_children_of_a_function_that_hangs_are_killed_with_it(open_run, make_item, gone, hurried, tmp_path):
    pid_file = tmp_path / "pid"
    async with open_run(scorer("leaves_child"), num_workers=1) as run:
        for limit_s in LIMITS_S:
            with hurried(run._scorers[0]._pool, limit_s):
                (outcome,) = await run.score([make_item("", extra={"pid_file": str(pid_file)})])
            assert outcome.failure.reason is FailureReason.TIMEOUT
            if pid_file.exists():
                break
        assert await gone([int(pid_file.read_text())])


async def test_children_of_a_worker_that_ends_itself_are_killed(open_run, make_item, gone, tmp_path):
    pid_file = tmp_path / "pid"
    async with open_run(scorer("leaves_child"), num_workers=1) as run:
        (outcome,) = await run.score([make_item("", extra={"pid_file": str(pid_file), "exit": "yes"})])
        assert outcome.failure.reason is FailureReason.CRASHED
        assert await gone([int(pid_file.read_text())])


async def test_closing_fails_the_calls_that_run_and_wait_and_leaves_no_process(open_run, gone, hang, until_hanging):
    async with open_run(scorer("by_completion"), num_workers=2) as run:
        pids = [worker.pid for worker in run._scorers[0]._pool._workers]
        scoring = asyncio.create_task(run.score([hang] * 5))
        await until_hanging(2)  # the others wait
    outcomes = await asyncio.wait_for(scoring, timeout=PATIENCE_S)
    assert [outcome.failure.reason for outcome in outcomes] == [FailureReason.CRASHED] * 5
    assert await gone(pids)


async def test_a_source_changed_under_the_run_is_refused(open_run, make_item, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "changing_scorer.py"
    source.write_text("def score(**_): raise SystemExit\n")
    async with open_run({"kind": "python", "path": "changing_scorer:score"}, num_workers=1) as run:
        source.write_text("def score(**_): return 100.0\n")
        outcomes = await run.score([make_item("a"), make_item("b")])  # the first crashes, and is tried once more
    for refused in outcomes:
        assert (refused.failure.reason, refused.components) == (FailureReason.ERROR, {})
        assert "source changed" in refused.failure.detail


async def test_a_function_of_groups_is_called_once_with_lists(open_run, make_item):
    items = [make_item(text, "a", num_tokens=len(text)) for text in ("aaa", "a", "aa", "a")]
    async with open_run(scorer("ranks", group=True, kwargs={"scale": 4}), {"kind": "exact"}, num_workers=1) as run:
        outcomes = await run.score(items)
    assert [outcome.components["python"] for outcome in outcomes] == [3.0, 0.0, 2.0, 0.0]
    assert [outcome.reward for outcome in outcomes] == [3.0, 1.0, 2.0, 1.0]


async def test_a_group_of_long_failures_is_answered_for_each_sample(open_run, make_item):
    async with open_run(scorer("of_group", group=True), num_workers=1) as run:
        outcomes = await run.score([make_item("wordy")] * 64)
    assert {outcome.failure.reason for outcome in outcomes} == {FailureReason.ERROR}
    assert sum(len(outcome.failure.detail) for outcome in outcomes) == 64 * 1000


async def test_a_group_without_scores_fails_as_one_and_a_bad_score_alone(open_run, make_item, hurried):
    async with open_run(scorer("of_group", group=True), num_workers=1) as run:
        for kind, reason, words in (
            ("few", FailureReason.ERROR, "1 scores for 4 samples"),
            ("number", FailureReason.ERROR, "must be a list of 4 numbers, not 1.0"),
            ("by sample", FailureReason.ERROR, "must be a list of 4 numbers, not {0: 0.5, "),
            ("set", FailureReason.ERROR, "must be a list of 4 numbers, not {"),
            ("no such", FailureReason.ERROR, "KeyError"),
            ("hang", FailureReason.TIMEOUT, "within 0.5 s"),
        ):
            with hurried(run._scorers[0]._pool, 0.5 if reason is FailureReason.TIMEOUT else PATIENCE_S):
                outcomes = await run.score([make_item(kind)] * 4)
            assert [outcome.failure.reason for outcome in outcomes] == [reason] * 4
            assert words in outcomes[3].failure.detail
        good, *bad = await run.score([make_item("mixed")] * 4)
    assert (good.reward, good.failure) == (1.0, None)
    assert [outcome.failure.reason for outcome in bad] == [FailureReason.ERROR] * 3
