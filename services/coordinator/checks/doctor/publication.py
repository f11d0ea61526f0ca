"""Tests a broadcast from a trainer to its replicas over the network path that publications use."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import ServiceInfo, TestBroadcast, WeightGroup

from services.common.errors import LockstepError, PermissionDenied, PreconditionFailed
from services.common.rpc.address import parse_address
from services.common.rpc.client import Client
from services.coordinator.checks.doctor.finding import Finding, Verdict, rate
from services.coordinator.services.launch import Addresses

_TIMEOUT_S = 20.0
# Longer than the services' own limit: see take_part in services/common/weights/trial.py.
_CALL_TIMEOUT_S = 150.0
_REFUSALS = (PreconditionFailed, PermissionDenied)
_FIX_BUSY = "stop the run, or use a certificate with role coordinator, and try again"


@dataclass(frozen=True)
class _BroadcastResult:
    """Holds the result of one broadcast: at the trainer (`sent`) and at each replica (`received`, by address)."""

    group: WeightGroup
    sent: TestBroadcast | LockstepError
    received: Mapping[str, TestBroadcast | LockstepError]

    @property
    def errors(self) -> list[LockstepError]:
        """Returns all errors, the replicas' first because they are more specific."""
        return [end for end in (*self.received.values(), self.sent) if isinstance(end, LockstepError)]


async def check_publication(
    given: Addresses, infos: Mapping[str, ServiceInfo], *, timeout_s: float = _TIMEOUT_S
) -> list[Finding]:
    """Checks that all replicas receive what the trainer sends; if not, tries each alone to find those that cannot.

    `infos` maps "kind address" to each service's answer to GetInfo. Nothing is tried if an answer is missing or if a
    service has a run open.
    """
    named = [f"trainer {given.trainer}", *(f"rollout {address}" for address in given.rollout)]
    if silent := [name for name in named if name not in infos]:
        return [Finding("broadcast", f"not tried: no answer from {', '.join(silent)}", Verdict.WARN, "see above")]
    if busy := [f"{name} has run {infos[name].run_id} open" for name in named if infos[name].run_id]:
        return [Finding("broadcast", f"not tried: {'; '.join(busy)}", Verdict.WARN, _FIX_BUSY)]
    try:
        tried = await _broadcast_to(given, given.rollout, timeout_s)
        if refused := [error for error in tried.errors if isinstance(error, _REFUSALS)]:
            raise refused[0]
        if not tried.errors or len(given.rollout) == 1:
            return [_finding(tried, address) for address in given.rollout]
        found = [_finding(await _broadcast_to(given, [address], timeout_s), address) for address in given.rollout]
    except LockstepError as error:
        verdict = Verdict.WARN if isinstance(error, _REFUSALS) else Verdict.FAIL
        return [Finding("broadcast", f"not tried: {error.message}", verdict, _FIX_BUSY)]
    if all(one.verdict is Verdict.OK for one in found):
        fix = f"each replica receives it alone; open all TCP ports between {', '.join(given.rollout)}"
        found.append(Finding("broadcast to all at once", _messages(tried.errors), Verdict.FAIL, fix))
    return found


async def _broadcast_to(given: Addresses, rollouts: Sequence[str], timeout_s: float) -> _BroadcastResult:
    """Broadcasts once to `rollouts`.

    Raises:
        LockstepError: The trainer did not start the broadcast.
    """
    request = trainer_pb2.SendTestBroadcastRequest(
        num_receivers=len(rollouts), host=parse_address(given.trainer, field="--trainer")[0], timeout_s=timeout_s
    )
    async with AsyncExitStack() as stack:
        trainer = Client(given.trainer, trainer_pb2_grpc.TrainerServiceStub, given.transport)
        stack.push_async_callback(trainer.close)
        stream = trainer.stream(TrainerService.SendTestBroadcast, request, timeout_s=_CALL_TIMEOUT_S)
        answers = await stack.enter_async_context(aclosing(stream))
        group = (await anext(answers)).group
        receiving = [_receive(address, given, group, rank) for rank, address in enumerate(rollouts, 1)]
        ends = await asyncio.gather(*receiving, _sent(answers), return_exceptions=True)
    expected: list[TestBroadcast | LockstepError] = []
    for end in ends:
        if not isinstance(end, LockstepError | TestBroadcast):
            raise end
        expected.append(end)
    *received, sent = expected
    return _BroadcastResult(group, sent, dict(zip(rollouts, received, strict=True)))


async def _sent(answers: AsyncIterator[trainer_pb2.SendTestBroadcastResponse]) -> TestBroadcast:
    return (await anext(answers)).outcome


async def _receive(address: str, given: Addresses, group: WeightGroup, rank: int) -> TestBroadcast:
    client = Client(address, rollout_pb2_grpc.RolloutServiceStub, given.transport)
    request = rollout_pb2.ReceiveTestBroadcastRequest(group=group, rank=rank)
    try:
        return (await client.call(RolloutService.ReceiveTestBroadcast, request, timeout_s=_CALL_TIMEOUT_S)).outcome
    finally:
        await client.close()


def _finding(tried: _BroadcastResult, address: str) -> Finding:
    check, group, sent, received = f"broadcast to {address}", tried.group, tried.sent, tried.received[address]
    if isinstance(sent, LockstepError) or isinstance(received, LockstepError):
        return Finding(check, _messages(tried.errors), Verdict.FAIL, _fix(group, sent, received, address))
    found = f"{rate(received)}, by {group.backend} from {sent.route} to {received.route}"
    if sent.digest != received.digest:
        fix = "look for bad memory or a bad link on either host"
        return Finding(check, f"{found}: the bytes differ from those sent", Verdict.FAIL, fix)
    return Finding(check, found)


def _fix(
    group: WeightGroup, sent: TestBroadcast | LockstepError, received: TestBroadcast | LockstepError, address: str
) -> str:
    ends = [
        f"{who}, which uses interface {route}" if (route := _route(end)) else who
        for who, end in ((f"the trainer {group.store_host}", sent), (f"rollout {address}", received))
    ]
    fix = f"open port {group.store_port} of {group.store_host}, the rendezvous port, and all TCP ports between "
    fix += " and ".join(ends)
    return f"{fix}; set NCCL_SOCKET_IFNAME to that interface on both" if group.backend == "nccl" else fix


def _route(end: TestBroadcast | LockstepError) -> str:
    return end.metadata.get("route", "") if isinstance(end, LockstepError) else end.route


def _messages(errors: Sequence[LockstepError]) -> str:
    return "; ".join(dict.fromkeys(error.message for error in errors))
