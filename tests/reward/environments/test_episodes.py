"""Episodes on the wire: answers from memory, leases, refusals. The environment plays in this process."""

import asyncio
import contextlib
import errno
from collections.abc import Mapping, Sequence

import pytest
from lockstep.reward.v1 import environment_pb2 as pb

from services.common.errors import InvalidInput, LockstepError, Overloaded, PreconditionFailed, Reason
from services.common.rpc.fence import new_token
from services.reward.environments import servicer as servicer_module
from services.reward.environments.base import Environment, Message, Reply, Turn, off_the_clock
from services.reward.errors import EnvironmentFailure, EpisodeError

LEASE_S = 0.2


class Scripted(Environment):
    """Notes its calls. A text names what the step does; `hold` waits until it is let go."""

    version = "1"
    roles = ("user", "tool")
    tools = ({"type": "function", "function": {"name": "look"}},)

    def __init__(self):
        self.calls: list[str] = []
        self.holds, self.go, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.canceled = 0

    async def reset(self, episode_id: str, seed: int, row: Mapping[str, object]) -> Sequence[Message]:
        return await self._do(str(row.get("do", "")), f"reset {seed}", [Message("user", "?")])

    async def step(self, episode_id: str, turn: Turn) -> Reply:
        reply = Reply([Message("tool", turn.text, "look")], reward=1.0, done=turn.text == "done")
        return await self._do(turn.text, f"step {turn.text} {turn.num_tokens} {turn.is_truncated}", reply)

    async def end(self, episode_id: str) -> None:
        self.calls.append("end")
        self.ended.set()

    async def close(self) -> None:
        self.calls.append("closed")

    async def _do(self, what, name, result):
        self.calls.append(name)
        if what == "hold":
            self.holds.set()
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.canceled += 1
                raise
        if what == "queue":
            with off_the_clock(), off_the_clock():
                self.holds.set()
                await self.go.wait()
        if what == "raise":
            raise RuntimeError("a bug")
        if what == "refuse":
            raise EpisodeError(EnvironmentFailure.REFUSED, "full")
        if what == "raw":
            return Reply([Message("", "<information>")])
        if what == "int_done":
            return Reply(done=1)
        if what == "assistant":
            return Reply([Message("assistant", "I won")])
        if what == "infinite":
            return Reply(reward=float("inf"))
        return result


@pytest.fixture
def environment(monkeypatch) -> Scripted:
    environment = Scripted()
    monkeypatch.setitem(servicer_module.KINDS, "python", lambda config: environment)
    return environment


CONFIG = {"kind": "python", "path": "module:Class"}


async def refused(call, reason: Reason = Reason.WRONG_STATE, error: type[LockstepError] = PreconditionFailed) -> str:
    with pytest.raises(error) as caught:
        await call
    assert caught.value.reason is reason
    return caught.value.message


def failure(response: pb.ResetResponse | pb.StepResponse) -> str:
    name = pb.EnvironmentFailureReason.Name(response.failure.reason)
    return name.removeprefix("ENVIRONMENT_FAILURE_REASON_") if response.HasField("failure") else ""


async def test_repeated_calls_are_answered_from_memory(service, environment):
    opened = await service.open(**CONFIG)
    assert (opened.scorer, opened.environment, list(opened.roles)) == ("exact 2 x 1", "python 1", ["user", "tool"])
    assert opened.tools_json == '[{"type": "function", "function": {"name": "look"}}]'
    assert await service.reset() == await service.reset()
    first = await service.step(0, "a")
    assert first == await service.step(0, "a")
    assert (first.messages[0].role, first.messages[0].content, first.messages[0].name) == ("tool", "a", "look")
    second = await service.step(1, "done")
    assert second.done and second == await service.step(1, "done")
    await environment.ended.wait()
    assert environment.calls == ["reset 7", "step a 3 False", "step done 3 False", "end"]


async def test_a_repeat_joins_the_call_in_progress_and_a_caller_that_gives_up_loses_nothing(service, environment):
    await service.open(**CONFIG)
    await service.reset()
    first = asyncio.create_task(service.step(0, "hold"))
    await environment.holds.wait()
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    second = asyncio.create_task(service.step(0, "hold"))
    assert "in progress" in await refused(service.step(1, "b"))
    environment.go.set()
    assert (await second).reward == 1.0
    assert (await service.step(1, "b")).reward == 1.0
    assert environment.calls == ["reset 7", "step hold 3 False", "step b 3 False"]
    assert environment.canceled == 0


async def test_what_is_out_of_order_is_refused(service, environment):
    assert "OpenRun" in await refused(service.reset(), Reason.RUN_NOT_OPEN)
    await service.open()
    assert "without an environment" in await refused(service.reset())
    await service.open(**CONFIG)
    await refused(service.reset(run_id="earlier"), Reason.SCORER_CHANGED)
    await refused(service.step(0, "a", "unknown"), Reason.EPISODE_NOT_OPEN)
    await service.close("unknown")
    await service.reset()
    await refused(service.reset(seed=8))
    await refused(service.step(1, "a"))
    await service.step(0, "a")
    assert "other content" in await refused(service.step(0, "b"))
    await refused(service.step(2, "c"))
    await service.step(1, "done")
    assert "over" in await refused(service.step(2, "c"))
    await refused(service.step(0, "a"))
    await service.close()
    await refused(service.step(1, "done"), Reason.EPISODE_NOT_OPEN)
    for wrong in (service.reset(""), service.reset(row_json="[1]"), service.step(0, "a", finish_reason=0)):
        await refused(wrong, Reason.INVALID_INPUT, InvalidInput)


async def test_a_reset_after_a_step_begins_the_episode_anew(service, environment):
    await service.open(**CONFIG)
    for text in "ab":
        await service.reset()
        assert (await service.step(0, text)).messages[0].content == text
    await service.close()
    assert environment.calls.count("end") == 2
    assert service.metric("lockstep_reward_episodes_open") == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "CRASHED"),
        ("refuse", "REFUSED"),
        ("int_done", "INVALID_REPLY"),
        ("assistant", "INVALID_REPLY"),
        ("infinite", "INVALID_REPLY"),
        ("raw", ""),
    ],
)
async def test_failures_are_typed_and_end_the_episode_once(service, environment, text, reason):
    await service.open(**CONFIG)
    await service.reset()
    answer = await service.step(0, text)
    assert failure(answer) == reason
    assert answer == await service.step(0, text)
    if reason:
        await environment.ended.wait()
        assert "over" in await refused(service.step(1, "a"))
        assert service.metric("lockstep_reward_environment_failures_total", reason=reason.lower()) == 1
    await service.close()
    assert environment.calls == ["reset 7", f"step {text} 3 False", "end"]


async def test_a_reset_that_fails_is_answered_from_memory_until_it_is_closed(service, environment):
    await service.open(**CONFIG)
    assert failure(await service.reset(do="refuse")) == failure(await service.reset(do="refuse")) == "REFUSED"
    assert "over" in await refused(service.step(0, "a"))
    await service.close()
    assert not failure(await service.reset())
    assert environment.calls == ["reset 7", "end", "reset 7"]


@pytest.mark.parametrize("call", ["reset", "step"])
async def test_a_reply_is_limited_in_time(service, environment, call):
    await service.open(**CONFIG, turn_s=LEASE_S)
    if call == "step":
        assert not failure(await service.reset())
    answer = await (service.reset(do="hold") if call == "reset" else service.step(0, "hold"))
    assert failure(answer) == "TIMEOUT"
    await environment.ended.wait()
    assert (environment.canceled, environment.calls.count("end")) == (1, 1)


async def test_waiting_for_a_place_is_not_limited_in_time(service, environment):
    await service.open(**CONFIG, turn_s=LEASE_S)
    for episode in ("waits", "later"):
        await service.reset(episode)
    waiting = asyncio.create_task(service.step(0, "queue", "waits"))
    await environment.holds.wait()
    environment.holds.clear()
    assert failure(await service.step(0, "hold", "later")) == "TIMEOUT"  # it began later, and its time is over
    environment.go.set()
    assert not failure(await waiting)
    environment.go.clear()
    assert failure(await service.step(1, "hold", "waits")) == "TIMEOUT"  # the next call has a clock of its own


async def test_a_lease_ends_a_call_that_waits_for_a_place(service, environment):
    await service.open(**CONFIG, episode_s=LEASE_S)
    answer = await service.reset(do="queue")
    assert failure(answer) == "TIMEOUT" and "episode_s" in answer.failure.message


async def test_an_episode_ends_with_its_lease(service, environment):
    await service.open(**CONFIG, episode_s=LEASE_S)
    await service.reset()
    await environment.ended.wait()
    assert "episode_s" in await refused(service.step(0, "a"), Reason.EPISODE_NOT_OPEN)
    assert environment.calls == ["reset 7", "end"]


async def test_a_lease_ends_the_call_in_progress(service, environment):
    await service.open(**CONFIG, episode_s=LEASE_S)
    answer = await service.reset(do="hold")
    assert failure(answer) == "TIMEOUT" and "episode_s" in answer.failure.message
    await environment.ended.wait()
    assert environment.calls == ["reset 7", "end"]


async def test_closing_the_run_ends_open_episodes_and_those_in_a_call(service, environment):
    await service.open(**CONFIG)
    for episode in ("idle", "e", "over"):
        await service.reset(episode)
    assert (await service.step(0, "done", "over")).done
    held = asyncio.create_task(service.step(0, "hold"))
    await environment.holds.wait()
    await service.close_run()
    assert failure(await held) == "CRASHED"
    assert environment.calls.count("end") == 3
    assert environment.calls[-1] == "closed"
    await refused(service.step(0, "a", "idle"), Reason.RUN_NOT_OPEN)


async def test_another_coordinator_of_the_run_ends_the_episodes_of_the_one_before(service, environment):
    await service.open(**CONFIG)
    await service.reset()
    await service.open(**CONFIG)  # as a coordinator does that has lost the connection for a moment
    assert (await service.step(0, "a")).reward == 1.0
    with new_token():
        await service.open(**CONFIG)
        await environment.ended.wait()
        await service.reset("other")
        await refused(service.step(1, "b"), Reason.EPISODE_NOT_OPEN)
    await refused(service.step(1, "b", "other"), Reason.RUN_REPLACED)
    assert environment.calls == ["reset 7", "step a 3 False", "end", "reset 7"]


async def test_an_environment_that_cannot_start_closes_the_scorers(service, environment):
    async def fails() -> None:
        raise EpisodeError(EnvironmentFailure.CRASHED, "no module")

    environment.open = fails
    assert "no module" in await refused(service.open(**CONFIG), Reason.INVALID_CONFIG, InvalidInput)
    assert environment.calls == ["closed"]
    await refused(service.reset(), Reason.RUN_NOT_OPEN)


async def test_an_environment_that_the_host_has_no_room_for_is_no_wrong_config(service, environment):
    async def fails() -> None:
        full = OSError(errno.EMFILE, "Too many open files")
        raise EpisodeError(EnvironmentFailure.CRASHED, f"a worker did not start: {full}") from full

    environment.open = fails
    assert "Too many open files; raise this limit" in await refused(
        service.open(**CONFIG), Reason.OVERLOADED, Overloaded
    )
    await refused(service.reset(), Reason.RUN_NOT_OPEN)
