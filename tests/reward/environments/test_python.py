"""Tests classes of the user, good and bad ones, as environments of the service."""

import asyncio
import os
import re
import signal

import pytest
from lockstep.reward.v1 import environment_pb2 as pb

from services.common.errors import InvalidInput, Reason
from services.reward.errors import EnvironmentFailure
from tests.support import LIMITS_S, raises, until
from tests.trainer.harness_processes import marked

DEATHS = ["exits", "floods", "answers_nonsense", "answers_another", "takes_memory"]
BAD_REPLIES = (
    "is_long",
    "is_a_number",
    "has_a_reward_that_is_not_finite",
    "has_a_reward_that_is_text",
    "lies_about_done",
    "has_no_role",
    "has_a_wrong_role",
    "is_no_text",
)


def user(name: str, **settings: object) -> dict[str, object]:
    return {"kind": "python", "path": f"user_environments:{name}", **settings}


def reason(response: pb.ResetResponse | pb.StepResponse) -> str:
    """Returns why the environment failed, or an empty text if it did not."""
    name = pb.EnvironmentFailureReason.Name(response.failure.reason)
    return name.removeprefix("ENVIRONMENT_FAILURE_REASON_") if response.HasField("failure") else ""


def texts(response: pb.ResetResponse | pb.StepResponse) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in response.messages]


def test_every_failure_reason_has_its_word_on_the_wire():
    assert {f"ENVIRONMENT_FAILURE_REASON_{reason}" for reason in EnvironmentFailure} == set(
        pb.EnvironmentFailureReason.keys()
    ) - {"ENVIRONMENT_FAILURE_REASON_UNSPECIFIED"}


async def test_ten_lines_make_an_environment(service):
    opened = await service.open(**user("Guess", kwargs={"top": 3}))
    kind, _, version = opened.environment.partition(" ")
    assert (kind, version[:2], opened.tools_json) == ("python", "1/", "")
    assert set(opened.roles) == {"user", "system", "tool"}
    assert texts(await service.reset(seed=7)) == [("user", "Guess my number, from 1 to 3.")]
    answers = [await service.step(turn, str(turn + 1)) for turn in range(2)]
    assert [(a.reward, a.done, texts(a)) for a in answers] == [(0.0, False, [("user", "higher")]), (1.0, True, [])]


async def test_what_numpy_returns_is_a_reward_and_an_end(service):
    await service.open(**user("Actor"))
    await service.reset()
    answer = await service.step(0, "is_of_numpy")
    assert (texts(answer), answer.reward, answer.done) == ([("user", "won")], 1.0, True)


async def test_a_class_says_which_roles_it_sends(service):
    opened = await service.open(**user("OnlyTools"))
    assert opened.roles == ["tool"]
    refused = await service.reset()  # it says something as the user
    assert reason(refused) == "INVALID_REPLY" and "must be one of `roles`, tool" in refused.failure.message


@pytest.mark.parametrize("name", ["Journal", "AsyncJournal"])
async def test_an_episode_is_reset_stepped_and_closed_once(service, tmp_path, name):
    journal = tmp_path / "journal"
    await service.open(**user(name))
    assert texts(await service.reset(seed=2**64 - 1, journal=str(journal))) == [("system", "be brief"), ("user", "?")]
    assert texts(await service.step(0, "hi")) == [("user", "HI")]
    assert (await service.step(1, "done")).done
    assert service.metric("lockstep_reward_environment_seconds_count", call="step") == 2
    for _ in range(2):
        await service.close()
    assert journal.read_text().splitlines() == [f"reset {2**64 - 1}", "step hi", "step done", "close"]
    assert service.metric("lockstep_reward_episodes_open") == 0


@pytest.mark.parametrize("name", ["Actor", "AsyncActor"])
async def test_an_environment_that_raises_or_replies_nonsense_fails_alone(service, name):
    await service.open(**user(name))
    (pid,) = service.pids
    await service.reset("other")
    expected = {"raises": "CRASHED", "stops_iterating": "CRASHED", "leaves": "CRASHED"}
    expected |= dict.fromkeys(BAD_REPLIES, "INVALID_REPLY")
    for what in expected:
        await service.reset(what)
    found = {what: reason(await service.step(0, what, what)) for what in expected}
    assert found == expected
    assert reason(await service.reset("r", reset="raises")) == "CRASHED"
    assert reason(await service.reset("n", reset="is_a_number")) == "INVALID_REPLY"
    await service.reset("c", close="raises")
    await service.close("c")
    assert texts(await service.step(0, "prints", "other")) == [("user", "printed")]
    assert texts(await service.step(1, "", "other")) == [("user", "next")]
    assert service.pids == [pid]
    assert service.metric("lockstep_reward_environment_failures_total", reason="invalid_reply") == len(BAD_REPLIES) + 1


@pytest.mark.parametrize("name", ["Actor", "AsyncActor"])
async def test_an_environment_that_raises_leaves_its_traceback_in_the_log_once(service, caplog, name):
    await service.open(**user(name))
    for episode in ("a", "b"):
        await service.reset(episode)
        answer = await service.step(0, "raises", episode)
        assert re.fullmatch(r"KeyError: 'column' \(user_environments\.py, line \d+\)", answer.failure.message)
    first, second = (r.getMessage() for r in caplog.records if "KeyError: 'column'" in r.getMessage())
    assert first.startswith("episode a/0: CRASHED: KeyError") and "Traceback" in first and "Traceback" not in second
    assert 'raise KeyError("column")' in first and "environments/worker.py" not in first


@pytest.mark.parametrize("what", marked(DEATHS, long=["floods", "answers_nonsense", "answers_another"]))
async def test_a_worker_that_dies_takes_its_episodes_with_it_and_is_restarted(service, gone, what):
    await service.open(**user("Actor"))
    (pid,) = service.pids
    for episode in ("e", "waits"):
        await service.reset(episode)
    assert reason(await service.step(0, what)) == "CRASHED"
    assert await gone([pid])
    assert reason(await service.step(0, "", "waits")) == "NEIGHBOR"
    await service.reset("again")
    assert texts(await service.step(0, "", "again")) == [("user", "next")]
    assert service.pids != [pid]


@pytest.mark.parametrize("call", marked(["reset", "step", "close"], long=["reset", "close"]))
async def test_a_worker_that_is_killed_in_a_call(service, gone, tmp_path, call):
    await service.open(**user("Actor"))
    (pid,) = service.pids
    row = {"file": str(tmp_path / "hanging"), **({call: "hangs"} if call != "step" else {})}
    resetting = asyncio.create_task(service.reset(**row))
    if call != "reset":
        await resetting
    calls = {"reset": resetting, "step": None, "close": None}
    if call == "step":
        calls["step"] = asyncio.create_task(service.step(0, "hangs"))
    if call == "close":
        calls["close"] = asyncio.create_task(service.close())
    await until((tmp_path / "hanging").exists)
    os.kill(pid, signal.SIGKILL)
    answer = await calls[call]
    assert answer is None or reason(answer) == "CRASHED"
    assert await gone([pid])
    await service.reset("again")
    assert texts(await service.step(0, "", "again")) == [("user", "next")]
    await service.close()
    await service.close("again")
    assert service.metric("lockstep_reward_episodes_open") == 0


async def test_a_call_that_hangs_in_a_thread_costs_no_other_episode(service, gone, tmp_path):
    for limit_s in LIMITS_S:  # long enough for a reset on a busy machine
        await service.open(**user("Actor", turn_s=limit_s))
        (pid,) = service.pids
        if not any([reason(await service.reset(episode, file=str(tmp_path / "f"))) for episode in ("e", "waits")]):
            break
    hung = await service.step(0, "hangs")
    assert (reason(hung), hung.failure.alone) == ("TIMEOUT", True)
    assert hung.failure.message.endswith("(environment.turn_s): step of 'hangs'")
    assert service.pids != [pid] and not reason(await service.reset("later"))
    for turn in range(2):
        assert texts(await service.step(turn, "", "waits")) == [("user", "next")]
    await service.close("waits")
    assert await gone([pid])
    assert texts(await service.step(0, "", "later")) == [("user", "next")]


async def test_a_worker_that_stalls_and_reads_no_more_is_killed(service, gone, tmp_path):
    stalled = tmp_path / "stalled"
    for limit_s in LIMITS_S:
        await service.open(**user("Actor", turn_s=limit_s))
        (pid,) = service.pids
        if not any([reason(await service.reset(episode, file=str(stalled))) for episode in ("e", "other")]):
            break
    stalling = asyncio.create_task(service.step(0, "stalls"))
    await until(stalled.exists)
    assert reason(await service.step(0, "x" * (1 << 20), "other")) == "NEIGHBOR"
    stalled_it = await stalling
    assert (reason(stalled_it), stalled_it.failure.alone) == ("TIMEOUT", True)
    assert await gone([pid])
    await service.close("other")


async def test_a_call_that_waits_on_the_event_loop_is_canceled(service):
    for limit_s in LIMITS_S:
        await service.open(**user("AsyncActor", turn_s=limit_s))
        if not any([reason(await service.reset(episode)) for episode in ("e", "waits")]):
            break
    before = service.pids
    assert reason(await service.step(0, "waits")) == "TIMEOUT"
    await service.close()
    assert texts(await service.step(0, "", "waits")) == [("user", "next")]
    assert service.pids == before


async def test_a_call_that_will_not_be_canceled_ends_with_its_worker(service, gone):
    for limit_s in LIMITS_S:
        await service.open(**user("AsyncActor", turn_s=limit_s))
        (pid,) = service.pids
        if not reason(await service.reset()):
            break
    assert reason(await service.step(0, "will_not_be_canceled")) == "TIMEOUT"
    assert await gone([pid])


async def test_episodes_spread_over_the_workers_and_survive_the_death_of_another(service, gone):
    await service.open(**user("Actor", num_workers=2))
    assert not any([reason(await service.reset(str(i))) for i in range(4)])
    killed = service.pids[0]
    os.kill(killed, signal.SIGKILL)
    assert await gone([killed])
    outcomes = [reason(await service.step(0, "", str(i))) for i in range(4)]
    assert sorted(outcomes) == ["", "", "NEIGHBOR", "NEIGHBOR"]


async def test_closing_the_run_fails_its_calls_and_leaves_no_process(service, gone, tmp_path):
    await service.open(**user("Actor", num_workers=2))
    pids = service.pids
    for episode in ("e", "idle"):
        await service.reset(episode, file=str(tmp_path / "hanging"))
    stepping = asyncio.create_task(service.step(0, "hangs"))
    await until((tmp_path / "hanging").exists)
    await service.close_run()
    assert reason(await stepping) == "CRASHED"
    assert await gone(pids)
    assert service.metric("lockstep_reward_episodes_open") == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [200, pytest.param(1000, marks=pytest.mark.long)])
async def test_many_episodes_are_open_at_once(service, number):
    await service.open(**user("AsyncActor", num_workers=2))
    names = [str(i) for i in range(number)]
    began = await asyncio.gather(*map(service.reset, names))
    assert not any(map(reason, began))
    assert service.metric("lockstep_reward_episodes_open") == len(names)
    for turn in range(2):
        answers = await asyncio.gather(*(service.step(turn, "", name) for name in names))
        assert {(a.reward, a.done, a.messages[0].content) for a in answers} == {(0.5, False, "next")}
    await asyncio.gather(*map(service.close, names))
    assert service.metric("lockstep_reward_episodes_open") == 0


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (user("Missing"), "has no attribute"),
        (user("NoStep"), "has no method step"),
        (user("Guess", kwargs={"bottom": 1}), r"Guess is called with \(bottom=\.\.\.\), but is defined as \(top=10\)"),
        (user("TakesNoRow"), r"TakesNoRow.reset is called with .* unexpected keyword argument 'row'"),
        (user("TakesNoText"), r"TakesNoText.step is called with \(self, text\).* too many positional"),
        (user("Unprepared"), "no corpus"),
        (user("WrongRoles"), "roles must be some of user, system, tool"),
        ({"kind": "python", "path": "no_such:Class"}, "No module"),
    ],
)
async def test_what_cannot_be_played_is_refused_when_the_run_opens(service, children, environment, message):
    before = children(os.getpid())
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="environment") as caught:
        await service.open(**environment)
    assert re.search(message, str(caught.value))
    assert children(os.getpid()) == before


async def test_a_source_that_changed_is_noticed_when_a_worker_restarts(service, tmp_path, monkeypatch, gone):
    source = tmp_path / "changing_environment.py"
    code = "class E:\n    def reset(self, seed, row):\n        return {0!r}\n    def step(self, text):\n        {1}\n"
    source.write_text(code.format("old", "__import__('os')._exit(3)"))
    monkeypatch.chdir(tmp_path)
    await service.open(kind="python", path="changing_environment:E")
    assert texts(await service.reset()) == [("user", "old")]
    source.write_text(code.format("new and longer", "pass"))
    assert reason(await service.step(0, "")) == "CRASHED"
    assert reason(await service.reset("again")) == "CRASHED"


async def test_the_digest_of_the_run_covers_the_environment(service):
    first = await service.open(**user("Guess"))
    (pid,) = service.pids
    assert await service.open(**user("Guess")) == first
    assert service.pids == [pid]
    await service.open(**user("Guess", kwargs={"top": 3}))
    assert service.pids != [pid]
