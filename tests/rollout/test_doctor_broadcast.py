"""Tests the broadcast of `lockstep doctor` from a trainer to real replicas without a run."""

import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1 import types_pb2

from services.common.errors import Aborted, InvalidInput, PermissionDenied, PreconditionFailed, Reason
from services.common.rpc.client import Client
from services.common.rpc.server import Server
from services.common.weights.store import ServedStore, StoreAddress, StoreClient
from services.common.weights.trial import take_part
from services.coordinator.doctor import Finding, Verdict
from services.coordinator.doctor import services as publication
from services.coordinator.doctor import services as running
from services.coordinator.doctor.services import check_publication, examine_services
from services.coordinator.fleet.launch import Addresses
from services.rollout import servicer as rollout
from services.trainer import servicer as trainer
from services.trainer.ranks.calls import Ranks
from tests.rollout.rollout_stack import PlayedTrainer
from tests.support import PATIENCE_S, free_port, raises

OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL


class Idle:
    """Stands in for a rank's worker that gets no request."""

    def kill_epoch(self) -> None: ...

    def saved(self) -> None: ...


@pytest_asyncio.fixture(scope="module")
async def addresses() -> AsyncIterator[Addresses]:
    """Yields the addresses of a trainer and two replicas."""
    async with contextlib.AsyncExitStack() as stack:

        async def served(add: object, servicer: object, name: str) -> str:
            server = Server()
            add(servicer, server.grpc)
            stack.push_async_callback(server.grpc.stop, 0)
            return f"127.0.0.1:{await server.start('127.0.0.1:0', [name])}"

        ranks = Ranks(1, "127.0.0.1", lambda why: None)
        servicer = trainer.TrainerServicer(ranks, Idle(), ServedStore("127.0.0.1"))
        at = await served(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer, trainer.NAME)
        replicas = [
            await served(
                rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
                rollout.RolloutServicer(lambda why: None),
                rollout.NAME,
            )
            for _ in range(2)
        ]
        yield Addresses(tuple(replicas), trainer=at)


def idle(addresses: Addresses) -> dict[str, types_pb2.ServiceInfo]:
    names = [f"trainer {addresses.trainer}", *(f"rollout {address}" for address in addresses.rollout)]
    return {name: types_pb2.ServiceInfo() for name in names}


async def test_every_replica_receives_what_the_trainer_sends(addresses: Addresses, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "_TIMEOUT_S", PATIENCE_S)  # this machine may be busy
    findings = {finding.check: finding for finding in await examine_services(addresses)}
    for address in addresses.rollout:
        finding = findings[f"broadcast to {address}"]
        assert finding.verdict is OK, finding
        assert "64 MiB in" in finding.result and "GB/s, by gloo from lo 127.0.0.1 to lo 127.0.0.1" in finding.result


async def test_a_store_that_cannot_be_reached_is_named_with_its_port(addresses: Addresses, monkeypatch):
    real, closed = trainer.trial_group, free_port()

    def elsewhere(*args: object, **settings: object) -> types_pb2.WeightGroup:
        group = real(*args, **settings)
        group.store_port = closed
        return group

    monkeypatch.setattr(trainer, "trial_group", elsewhere)
    one = Addresses(addresses.rollout[:1], trainer=addresses.trainer)
    (finding,) = await check_publication(one, idle(one), timeout_s=2)
    assert (finding.verdict, finding.check) == (FAIL, f"broadcast to {one.rollout[0]}")
    assert f"the trainer's store at 127.0.0.1:{closed} cannot be reached" in finding.result
    assert f"open port {closed} of 127.0.0.1" in finding.fix
    assert f"rollout {one.rollout[0]}, which uses interface lo 127.0.0.1" in finding.fix


async def test_a_replica_that_does_not_come_ends_it_at_the_deadline(addresses: Addresses):
    client = Client(addresses.trainer, trainer_pb2_grpc.TrainerServiceStub)
    request = trainer_pb2.SendTestBroadcastRequest(num_receivers=1, host="127.0.0.1", timeout_s=2.0)
    groups = []
    with raises(Aborted) as caught:
        async for answer in client.stream(TrainerService.SendTestBroadcast, request, timeout_s=PATIENCE_S):
            groups.append(answer.group)
    assert caught.value.metadata["route"] == "lo 127.0.0.1"
    # Nobody can join later, because the secret was that of this broadcast only.
    (group,) = groups
    with pytest.raises(ConnectionRefusedError, match="does not accept the secret"):
        StoreClient(StoreAddress(group.store_host, group.store_port, group.store_secret), PATIENCE_S)
    for field, wrong in (("num_receivers", {"num_receivers": 0}), ("timeout_s", {"timeout_s": 1e9})):
        request = trainer_pb2.SendTestBroadcastRequest(**{"num_receivers": 1, "timeout_s": 1.0} | wrong)
        with raises(InvalidInput, field=field):
            _ = [
                answer
                async for answer in client.stream(TrainerService.SendTestBroadcast, request, timeout_s=PATIENCE_S)
            ]
    await client.close()


async def test_a_trainer_that_is_called_by_ipv6():
    with pytest.raises(Aborted, match=r"^\[::1\]: weights travel over IPv4"):
        await take_part(types_pb2.WeightGroup(store_host="[::1]"), 1)


async def test_a_replica_with_a_run_refuses(played: PlayedTrainer):
    group = types_pb2.WeightGroup(store_host="127.0.0.1", store_port=1, world_size=2, timeout_s=1.0)
    request = rollout_pb2.ReceiveTestBroadcastRequest(group=group, rank=1)
    with raises(PreconditionFailed, reason=Reason.WRONG_STATE):
        await played.replica.client.call(RolloutService.ReceiveTestBroadcast, request, timeout_s=PATIENCE_S)


async def test_services_of_a_run_or_without_an_answer_are_left_alone():
    addresses = Addresses(("b:1",), trainer="a:1")
    run = types_pb2.ServiceInfo(run_id="r")
    (finding,) = await check_publication(addresses, idle(addresses) | {"rollout b:1": run})
    assert (finding.verdict, "rollout b:1 has run r open" in finding.result) == (WARN, True)
    (finding,) = await check_publication(addresses, {"rollout b:1": run})
    assert (finding.verdict, "not tried: no answer from trainer a:1" in finding.result) == (WARN, True)


def sent(digest: str = "same", route: str = "eth0 10.0.0.1") -> types_pb2.TestBroadcast:
    return types_pb2.TestBroadcast(digest=digest, num_bytes=64 << 20, duration_s=0.5, route=route)


async def judged(monkeypatch: pytest.MonkeyPatch, *tries: dict[str, object]) -> list[Finding]:
    """Returns the findings about replicas b:1 and c:1, if each of `tries` is the result of one broadcast."""
    left = list(tries)

    async def next_try(addresses: Addresses, rollouts: list[str], timeout_s: float) -> publication._BroadcastResult:
        ends = left.pop(0)
        assert sorted(ends.keys() - {"sent"}) == sorted(rollouts)
        group = types_pb2.WeightGroup(store_host="a", store_port=7, backend="nccl")
        return publication._BroadcastResult(group, ends.get("sent", sent()), {name: ends[name] for name in rollouts})

    monkeypatch.setattr(publication, "_broadcast_to", next_try)
    addresses = Addresses(("b:1", "c:1"), trainer="a:1")
    findings = await check_publication(addresses, idle(addresses))
    assert not left
    return findings


async def test_which_replica_it_is(monkeypatch: pytest.MonkeyPatch):
    gave_up = Aborted("waited 20 s", route="eth0 10.0.0.1")
    blocked = Aborted("no way to the store", route="eth9 10.9.9.9")
    together = {"b:1": gave_up, "c:1": blocked, "sent": gave_up}
    good, bad = await judged(monkeypatch, together, {"b:1": sent()}, {"c:1": blocked, "sent": gave_up})
    assert (good.verdict, bad.verdict) == (OK, FAIL)
    assert bad.result == "no way to the store; waited 20 s"
    assert "open port 7 of a" in bad.fix and "eth0 10.0.0.1" in bad.fix and "eth9 10.9.9.9" in bad.fix
    assert "NCCL_SOCKET_IFNAME" in bad.fix

    *each, all_at_once = await judged(monkeypatch, together, {"b:1": sent()}, {"c:1": sent()})
    assert [one.verdict for one in (*each, all_at_once)] == [OK, OK, FAIL]
    assert "between b:1, c:1" in all_at_once.fix

    same, other = await judged(monkeypatch, {"b:1": sent(), "c:1": sent("other")})
    assert (same.verdict, other.verdict) == (OK, FAIL)
    assert "64 MiB in 0.500 s, 0.1 GB/s, by nccl" in same.result and "the bytes differ from those sent" in other.result

    (refused,) = await judged(monkeypatch, {"b:1": PermissionDenied("wrong role"), "c:1": gave_up})
    assert (refused.verdict, refused.result) == (WARN, "not tried: wrong role")
