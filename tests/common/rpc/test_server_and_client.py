"""Errors, deadlines and the life of a server, over real gRPC."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService
from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.errors import (
    ERROR_CLASSES,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    LockstepError,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from services.common.rpc import channel
from services.common.rpc.address import parse_address, require_loopback
from services.common.rpc.channel import require_mutual_trust
from services.common.rpc.client import Client
from services.common.rpc.server import Server, shielded
from services.common.tasks import gather
from services.common.weights.plan import require_stamp
from tests.support import LIMITS_S, PATIENCE_S, free_port, raises, until

NAMES = ["lockstep.reward.v1.RewardService", "lockstep.rollout.v1.RolloutService"]


class Reward(reward_pb2_grpc.RewardServiceServicer):
    """Does what the test wants of Score."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        if self.error is not None:
            raise self.error
        return pb.ScoreResponse(scorer=request.prompt)

    async def OpenRun(self, request: pb.OpenRunRequest, context: Any) -> pb.OpenRunResponse:
        self.entered.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return pb.OpenRunResponse()

    @shielded
    async def CloseRun(self, request: pb.CloseRunRequest, context: Any) -> pb.CloseRunResponse:
        context.add_done_callback(lambda _: self.cancelled.set())
        self.entered.set()
        await self.gate.wait()
        raise Unavailable("nobody is there", reason=Reason.UNREACHABLE)


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Streams two answers and then raises, or waits."""

    def __init__(self) -> None:
        self.error: LockstepError | None = None
        self.closed = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield rollout_pb2.GenerateResponse()
            yield rollout_pb2.GenerateResponse()
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:
            self.closed.set()


class Rig:
    def __init__(self) -> None:
        self.server, self.reward, self.rollout = Server(), Reward(), Rollout()
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self.reward, self.server.grpc)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self.rollout, self.server.grpc)
        self.address = ""

    async def start(self) -> None:
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1:0', NAMES)}"
        self.client = Client(self.address, reward_pb2_grpc.RewardServiceStub)
        self.rollout_client = Client(self.address, rollout_pb2_grpc.RolloutServiceStub)

    async def score(self, prompt: str = "") -> pb.ScoreResponse:
        return await self.client.call(RewardService.Score, pb.ScoreRequest(prompt=prompt), timeout_s=PATIENCE_S)

    async def error_of(self, error: BaseException) -> LockstepError:
        self.reward.error = error
        with pytest.raises(LockstepError) as caught:
            await self.score()
        return caught.value


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.start()
    yield rig
    await rig.client.close()
    await rig.rollout_client.close()
    await rig.server.grpc.stop(None)


@pytest.mark.parametrize("cls", ERROR_CLASSES)
async def test_every_error_arrives_as_it_was_raised(rig: Rig, cls: type[LockstepError]) -> None:
    for reason in Reason:
        error = await rig.error_of(cls("wrong, × and \n more", reason=reason, field="a.b", count=3))
        assert type(error) is cls
        assert (error.reason, error.message) == (reason, "wrong, × and \n more")
        assert error.metadata == {"field": "a.b", "count": "3"}
    assert (await rig.error_of(cls("plain"))).reason is cls.default_reason


def test_every_class_has_a_code_of_its_own() -> None:
    assert len({cls.code for cls in ERROR_CLASSES}) == len(ERROR_CLASSES)


async def test_long_error_arrives(rig: Rig) -> None:
    """Tracebacks are long, and gRPC drops headers above some KiB together with what they say."""
    trace = "".join(f"File {i}, line {i}, in function\n" for i in range(3000))
    error = await rig.error_of(InternalError("first words " + "x" * 50_000, reason=Reason.RANK_FAILED, traceback=trace))
    assert (type(error), error.reason) == (InternalError, Reason.RANK_FAILED)
    assert error.message.startswith("first words")
    # The last frame is where it happened.
    assert error.metadata["traceback"].endswith("File 2999, line 2999, in function\n")


async def test_long_error_in_many_bytes_per_character_arrives(rig: Rig) -> None:
    error = await rig.error_of(InvalidInput("名" * 20_000, field="名" * 20_000))
    assert (type(error), error.reason) == (InvalidInput, Reason.INVALID_INPUT)


async def test_other_exception_is_internal_with_traceback(rig: Rig) -> None:
    error = await rig.error_of(ZeroDivisionError("boom"))
    assert type(error) is InternalError
    assert error.reason is Reason.INTERNAL
    assert "ZeroDivisionError: boom" in error.message
    assert "in Score" in error.metadata["traceback"]
    rig.reward.error = None
    assert (await rig.score("next")).scorer == "next"


async def test_error_of_a_stream_arrives_after_its_answers(rig: Rig) -> None:
    rig.rollout.error = PreconditionFailed("moved on", reason=Reason.STALE_STAMP)
    received = 0
    with raises(PreconditionFailed, reason=Reason.STALE_STAMP):
        async for _ in rig.rollout_client.stream(
            RolloutService.Generate, rollout_pb2.GenerateRequest(), timeout_s=PATIENCE_S
        ):
            received += 1
    assert received == 2


async def test_deadline_ends_the_call_on_both_ends(rig: Rig) -> None:
    for limit_s in LIMITS_S:
        with pytest.raises(DeadlineExceeded) as caught:
            await rig.client.call(RewardService.OpenRun, pb.OpenRunRequest(), timeout_s=0.2 * limit_s)
        if rig.reward.entered.is_set():
            break
    assert caught.value.reason is Reason.DEADLINE
    assert rig.address in caught.value.message
    async with asyncio.timeout(PATIENCE_S):
        await rig.reward.cancelled.wait()


async def test_deadline_of_a_stream(rig: Rig) -> None:
    with pytest.raises(DeadlineExceeded):
        async for _ in rig.rollout_client.stream(RolloutService.Generate, rollout_pb2.GenerateRequest(), timeout_s=0.2):
            pass


async def give_up(rig: Rig, call: asyncio.Task[Any]) -> None:
    """Cancels `call` when the server has it, and waits until the server knows."""
    await rig.reward.entered.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(PATIENCE_S):
        await rig.reward.cancelled.wait()


async def test_cancelled_call_is_cancelled_at_the_server(rig: Rig) -> None:
    call = asyncio.create_task(rig.client.call(RewardService.OpenRun, pb.OpenRunRequest(), timeout_s=PATIENCE_S))
    await give_up(rig, call)


async def test_an_error_of_a_shielded_call_is_logged_as_a_line_when_its_caller_has_given_up(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    call = asyncio.create_task(rig.client.call(RewardService.CloseRun, pb.CloseRunRequest(), timeout_s=PATIENCE_S))
    await give_up(rig, call)
    rig.reward.gate.set()
    said = "/lockstep.reward.v1.RewardService/CloseRun, whose caller has given up: UNREACHABLE nobody is there"
    await until(lambda: said in caplog.messages)


async def test_closed_stream_is_closed_at_the_server(rig: Rig) -> None:
    stream = rig.rollout_client.stream(RolloutService.Generate, rollout_pb2.GenerateRequest(), timeout_s=PATIENCE_S)
    async with contextlib.aclosing(stream) as answers:
        await anext(answers)
    async with asyncio.timeout(PATIENCE_S):
        await rig.rollout.closed.wait()


async def test_server_that_is_not_there_is_unavailable() -> None:
    client = Client(f"127.0.0.1:{free_port()}", reward_pb2_grpc.RewardServiceStub)
    with pytest.raises(Unavailable) as caught:
        await client.call(RewardService.Score, pb.ScoreRequest(), timeout_s=PATIENCE_S)
    assert caught.value.reason is Reason.UNREACHABLE
    await client.close()


async def test_server_that_goes_away_in_a_call_is_unavailable(rig: Rig) -> None:
    call = asyncio.create_task(rig.client.call(RewardService.OpenRun, pb.OpenRunRequest(), timeout_s=PATIENCE_S))
    await rig.reward.entered.wait()
    await rig.server.grpc.stop(None)
    with pytest.raises(Unavailable):
        await call


async def test_server_that_nobody_can_reach_is_unavailable_once_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "_PATIENCE_S", 0.0)
    client = Client(f"127.0.0.1:{free_port()}", reward_pb2_grpc.RewardServiceStub)
    tried: list[str] = []

    async def explain(*ends: Any) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(channel, "_EXPLAIN_S", PATIENCE_S)  # how long, not how often
            tried.append(await require_mutual_trust(*ends))
        return tried[-1]

    monkeypatch.setattr(channel, "_EXPLAIN_S", 0.05)
    monkeypatch.setattr(channel, "require_mutual_trust", explain)
    call = functools.partial(client.call, RewardService.Score, pb.ScoreRequest(), wait_for_ready=True)
    waiting = asyncio.create_task(call(timeout_s=PATIENCE_S))
    await until(lambda: len(tried) == 3)
    said = f"Score at {client.address}: no connection yet, waiting up to {PATIENCE_S:g} s: Connection refused"
    assert caplog.messages == [said]  # once, while the reason stays the same
    waiting.cancel()
    with pytest.raises(Unavailable, match=r"no connection within 0\.1 s: Connection refused") as caught:
        await call(timeout_s=0.1)
    assert caught.value.reason is Reason.UNREACHABLE
    assert client.address in caught.value.message
    await client.close()


async def test_server_that_was_there_but_is_slow_is_not_unavailable(rig: Rig) -> None:
    await rig.score()  # connects
    with pytest.raises(DeadlineExceeded):
        await rig.client.call(RewardService.OpenRun, pb.OpenRunRequest(), timeout_s=0.5, wait_for_ready=True)


async def test_address_of_another_service_is_named(rig: Rig) -> None:
    client = Client(rig.address, trainer_pb2_grpc.TrainerServiceStub)
    for wait_for_ready in (False, True):
        with pytest.raises(InvalidInput, match=f"{rig.address} is not a trainer service.* OpenRun"):
            await client.call(
                TrainerService.OpenRun,
                trainer_pb2.OpenRunRequest(),
                timeout_s=PATIENCE_S,
                wait_for_ready=wait_for_ready,
            )
    with pytest.raises(InvalidInput, match="a trainer service"):
        async for _ in client.stream(TrainerService.Forward, iter([]), timeout_s=PATIENCE_S):
            pass
    await client.close()


async def test_served_until_stopped(rig: Rig) -> None:
    serving = asyncio.create_task(rig.server.serve(grace_s=0.1))
    assert (await rig.score("x")).scorer == "x"
    rig.server.stop()
    assert await serving == 0


async def test_failed_service_ends_with_an_exit_code(rig: Rig) -> None:
    serving = asyncio.create_task(rig.server.serve(grace_s=0.1))
    await rig.score()
    rig.server.fail("engine died")
    assert await serving == 1


async def test_port_in_use_is_refused(rig: Rig) -> None:
    other = Server()
    with raises(InvalidInput, field="listen"):
        await other.start(rig.address, NAMES)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "no-such-host.invalid"])
async def test_plaintext_off_loopback_is_refused(host: str) -> None:
    with raises(InvalidInput, field="listen"):
        await Server().start(f"{host}:0", NAMES)
    require_loopback(host, insecure=True)


async def test_plaintext_off_loopback_is_served_when_asked_for() -> None:
    server = Server()
    assert await server.start("0.0.0.0:0", NAMES, insecure=True) > 0
    await server.grpc.stop(None)


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:port", "host:65536", "host:-1", "host:1.5", "::1:8000"]
)
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_address(address, field="rollout.addresses")
    assert caught.value.metadata["field"] == "rollout.addresses"


async def test_health_is_told(rig: Rig) -> None:
    async with grpc.aio.insecure_channel(rig.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", *NAMES):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(rig: Rig) -> None:
    async with grpc.aio.insecure_channel(rig.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter([request]), timeout=PATIENCE_S)]
        listed = {service.name for service in answer.list_services_response.service}
    assert listed >= {*NAMES, "grpc.health.v1.Health"}


HELD = PolicyStamp(version=4, digest="a" * 32)


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        (PolicyStamp(version=3, digest="a" * 32), Reason.STALE_STAMP),
        (PolicyStamp(version=5, digest="a" * 32), Reason.FUTURE_STAMP),
        (PolicyStamp(version=4, digest="b" * 32), Reason.DIGEST_MISMATCH),
    ],
)
def test_only_the_held_stamp_passes(expected: PolicyStamp, reason: Reason) -> None:
    with pytest.raises(PreconditionFailed) as caught:
        require_stamp(expected, HELD, who="x")
    assert caught.value.reason is reason
    with pytest.raises(PreconditionFailed) as caught:
        require_stamp(HELD, PolicyStamp(version=4), who="x")
    assert caught.value.reason is Reason.UNPUBLISHED
    with pytest.raises(InvalidInput):
        require_stamp(PolicyStamp(version=4), HELD, who="x")
    require_stamp(PolicyStamp(version=4, digest="a" * 32), HELD, who="x")


async def test_gather_raises_the_first_failure_and_ends_the_rest() -> None:
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fails() -> None:
        raise InvalidInput("bad")

    with raises(InvalidInput):
        await gather([waits(), fails()])
    assert ended.is_set()

    async def returns(value: int) -> int:
        return value

    assert await gather(returns(value) for value in range(3)) == [0, 1, 2]
