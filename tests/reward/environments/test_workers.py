"""Tests how little an episode that hangs or crashes costs the other episodes of its worker."""

import asyncio
import os

import pytest

from tests.reward.environments.test_python import reason, texts, user
from tests.support import LIMITS_S, until
from tests.trainer.harness_processes import few_of

WHERE = ["reset", "step", "close"]
NAMES = ["Harmful", "AsyncHarmful"]
ALONE = {"exits": "CRASHED", "stalls": "TIMEOUT", "sleeps": "TIMEOUT"}


def harmful(how: str, where: str = "step", **settings: object) -> dict[str, object]:
    return user("Harmful", kwargs={"rows": ["bad"], "how": how, "where": where, "turns": 9}, **settings)


async def begin(service, environment: dict[str, object], **others: str) -> None:
    """Opens the environment and begins an episode for each of `others`; `turn_s` is long enough for that."""
    # After a hang, an episode is played again in a new worker within one limit, which takes a second on a busy machine.
    for limit_s in (3.0, *LIMITS_S[1:]):
        await service.open(**{**environment, "turn_s": limit_s})
        if not any([reason(await service.reset(name, prompt=prompt)) for name, prompt in others.items()]):
            return


async def test_the_methods_of_an_episode_that_are_not_async_run_in_one_thread_of_its_own(service, tmp_path):
    await service.open(**user("OneThread"))
    names = [str(index) for index in range(8)]
    await asyncio.gather(*(service.reset(name, file=str(tmp_path / name)) for name in names))
    for turn in range(3):
        answers = await asyncio.gather(*(service.step(turn, f"{name}t{turn}", name) for name in names))
        for name, answer in zip(names, answers, strict=True):
            assert not answer.HasField("failure"), answer.failure.message
            assert texts(answer) == [("user", f"{turn} {' '.join(f'{name}t{past}' for past in range(turn + 1))}")]
    await asyncio.gather(*map(service.close, names))
    assert [(tmp_path / name).read_text() for name in names] == ["closed"] * 8


@pytest.mark.parametrize(
    ("how", "where"),
    few_of([("spins", "reset"), ("sleeps", "step"), ("sleeps", "close")], ["queries", "spins", "sleeps"], WHERE),
)
async def test_a_hang_costs_no_other_episode(service, gone, how, where):
    await begin(service, harmful(how, where), good="good", **({} if where == "reset" else {"bad": "bad"}))
    (pid,) = service.pids
    if where == "close":
        await service.close("bad")
    else:
        answer = await (service.step(0, "", "bad") if where == "step" else service.reset("bad", prompt="bad"))
        assert (reason(answer), answer.failure.alone) == ("TIMEOUT", True)
    assert not reason(await service.step(0, "", "good"))
    assert service.pids != [pid], "another worker takes its place"
    await service.close("good")
    assert await gone([pid])


async def test_workers_with_a_hanging_call_are_few(service, gone):
    for limit_s in LIMITS_S:
        await service.open(**{**harmful("sleeps"), "turn_s": limit_s})
        resets = [reason(await service.reset(name, prompt=name)) for name in ("bad", "good")]
        first = service.pids
        assert any(resets) or reason(await service.step(0, "", "bad")) == "TIMEOUT"
        in_time = [*resets, reason(await service.step(0, "", "good"))]
        in_time += [reason(await service.reset(f"{name}2", prompt=name)) for name in ("bad", "good")]
        if not any(in_time):
            break
    assert not any(in_time)
    assert reason(await service.step(0, "", "bad2")) == "TIMEOUT"
    assert await gone(first)
    lost = await service.step(1, "", "good")
    assert (reason(lost), lost.failure.alone) == ("NEIGHBOR", False)
    assert not reason(await service.step(0, "", "good2"))


@pytest.mark.parametrize("how", ["exits", "takes_memory"])
async def test_of_several_calls_the_one_that_began_last_is_to_be_played_again_alone(service, tmp_path, how):
    await service.open(**user("Actor"))
    for name in ("good", "bad", "idle"):
        await service.reset(name, file=str(tmp_path / "began"))
    good = asyncio.create_task(service.step(0, "hangs", "good"))
    await until((tmp_path / "began").exists)
    bad = await service.step(0, how, "bad")
    assert (reason(bad), bad.failure.alone) == ("CRASHED", True)
    for other in (await good, await service.step(0, "", "idle")):
        assert (reason(other), other.failure.alone) == ("NEIGHBOR", False)


@pytest.mark.parametrize(("name", "how"), few_of([("AsyncHarmful", "exits"), ("Harmful", "stalls")], NAMES, ALONE))
async def test_an_episode_alone_hurts_nobody_and_its_failure_is_its_own(service, name, how):
    environment = harmful(how) | {"path": f"user_environments:{name}"}
    await begin(service, environment, good="good")
    (shared,) = service.pids
    assert not reason(await service.reset("bad", prompt="bad", alone=True))
    waiting = asyncio.create_task(service.reset("second", prompt="good", alone=True))  # num_workers is 1
    answer = await service.step(0, "", "bad")
    assert (reason(answer), answer.failure.alone) == (ALONE[how], False)
    assert not reason(await waiting), "the place is free again"
    assert not reason(await service.step(0, "", "second"))
    assert not reason(await service.step(0, "", "good")) and service.pids == [shared]
    await service.close("second")


async def test_closing_the_run_ends_all_kinds_of_workers(service, gone, children):
    before = set(children(os.getpid()))
    await begin(service, harmful("sleeps"), bad="bad", good="good")
    assert reason(await service.step(0, "", "bad")) == "TIMEOUT"
    await service.reset("alone", prompt="good", alone=True)
    started = set(children(os.getpid())) - before
    assert len(started) == 3
    await service.close_run()
    assert await gone(list(started))
    assert service.metric("lockstep_reward_episodes_open") == 0


async def test_a_function_that_hangs_costs_no_other_episode(service):
    tools = [{"kind": "function", "path": f"user_tools:{name}"} for name in ("breaks", "echo")]
    for limit_s in LIMITS_S:
        await service.open(kind="tools", tools=tools, turn_s=limit_s)
        if not any([reason(await service.reset(name)) for name in ("bad", "good")]):
            break
    hang = '<tool_call>{"name": "breaks", "arguments": {"how": "hang"}}</tool_call>'
    hung = await service.step(0, hang, "bad")
    assert (reason(hung), hung.failure.alone) == ("TIMEOUT", True) and "breaks" in hung.failure.message
    echo = '<tool_call>{"name": "echo", "arguments": {"text": "hi"}}</tool_call>'
    assert texts(await service.step(0, echo, "good")) == [("tool", "hi")]
    assert not reason(await service.reset("again", alone=True))
    hung = await service.step(0, hang, "again")
    assert (reason(hung), hung.failure.alone) == ("TIMEOUT", False)
