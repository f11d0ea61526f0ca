"""Checks running services and a broadcast of weights between them, or else between two processes of this host."""

import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from lockstep.reward.v1 import reward_pb2, reward_pb2_grpc
from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from lockstep.types.v1.types_pb2 import ServiceInfo, TestBroadcast, WeightGroup

from services.common.errors import InvalidInput, LockstepError, PermissionDenied, PreconditionFailed, Unauthenticated
from services.common.rpc.address import parse_address
from services.common.rpc.client import Client
from services.common.rpc.tls import Transport
from services.common.tasks import gather
from services.coordinator.doctor import Finding, Verdict
from services.coordinator.fleet.launch import Addresses

_PUBLICATION_TIMEOUT_S = 20.0
# Longer than the services' own limit: see take_part in services/common/weights/trial.py.
_CALL_TIMEOUT_S = 150.0
_Trainer, _Rollout = trainer_pb2_grpc.TrainerServiceServicer, rollout_pb2_grpc.RolloutServiceServicer
_REFUSALS = (PreconditionFailed, PermissionDenied)
_FIX_BUSY = "stop the run, or use a certificate with role coordinator, and try again"


_Outcome = TestBroadcast | LockstepError
_Answer = trainer_pb2.SendTestBroadcastResponse | rollout_pb2.ReceiveTestBroadcastResponse


@dataclass(frozen=True)
class _BroadcastResult:
    """The result of one broadcast: at the trainer (`sent`) and at each replica (`received`, by address)."""

    group: WeightGroup
    sent: _Outcome
    received: Mapping[str, _Outcome]

    @property
    def errors(self) -> list[LockstepError]:
        """Returns all errors, the replicas' first because they are more specific."""
        return [end for end in (*self.received.values(), self.sent) if isinstance(end, LockstepError)]


async def check_publication(
    addresses: Addresses, infos: Mapping[str, ServiceInfo], *, timeout_s: float = _PUBLICATION_TIMEOUT_S
) -> list[Finding]:
    """Checks that all replicas receive what the trainer sends; if not, tries each alone to find those that cannot.

    `infos` maps "kind address" to each service's answer to GetInfo. Nothing is tried if an answer is missing or if a
    service has a run open.
    """
    named = [f"trainer {addresses.trainer}", *(f"rollout {address}" for address in addresses.rollout)]
    if silent := [name for name in named if name not in infos]:
        return [Finding("broadcast", f"not tried: no answer from {', '.join(silent)}", Verdict.WARN, "see above")]
    if busy := [f"{name} has run {infos[name].run_id} open" for name in named if infos[name].run_id]:
        return [Finding("broadcast", f"not tried: {'; '.join(busy)}", Verdict.WARN, _FIX_BUSY)]
    try:
        tried = await _broadcast_to(addresses, addresses.rollout, timeout_s)
        if refused := [error for error in tried.errors if isinstance(error, _REFUSALS)]:
            raise refused[0]
        if not tried.errors or len(addresses.rollout) == 1:
            return [_finding(tried, address) for address in addresses.rollout]
        findings = [_finding(await _broadcast_to(addresses, [at], timeout_s), at) for at in addresses.rollout]
    except LockstepError as error:
        verdict = Verdict.WARN if isinstance(error, _REFUSALS) else Verdict.FAIL
        return [Finding("broadcast", f"not tried: {error.message}", verdict, _FIX_BUSY)]
    if all(one.verdict is Verdict.OK for one in findings):
        fix = f"each replica receives it alone; open all TCP ports between {', '.join(addresses.rollout)}"
        findings.append(Finding("broadcast to all at once", _messages(tried.errors), Verdict.FAIL, fix))
    return findings


async def _broadcast_to(addresses: Addresses, rollouts: Sequence[str], timeout_s: float) -> _BroadcastResult:
    """Broadcasts once to `rollouts`.

    Raises:
        LockstepError: The trainer did not start the broadcast.
    """
    request = trainer_pb2.SendTestBroadcastRequest(
        num_receivers=len(rollouts), host=parse_address(addresses.trainer, field="--trainer")[0], timeout_s=timeout_s
    )
    async with AsyncExitStack() as stack:
        trainer = Client(addresses.trainer, trainer_pb2_grpc.TrainerServiceStub, addresses.transport)
        stack.push_async_callback(trainer.close)
        stream = trainer.stream(_Trainer.SendTestBroadcast, request, timeout_s=_CALL_TIMEOUT_S)
        answers = await stack.enter_async_context(aclosing(stream))
        group = (await anext(answers)).group
        receiving = [_receive(address, addresses, group, rank) for rank, address in enumerate(rollouts, 1)]
        # Sender and receivers wait for one another, so all calls are made at once.
        *received, sent = await gather([*receiving, _outcome_or_error(anext(answers))])
    return _BroadcastResult(group, sent, dict(zip(rollouts, received, strict=True)))


async def _outcome_or_error(answering: Awaitable[_Answer]) -> _Outcome:
    try:
        return (await answering).outcome
    except LockstepError as error:
        return error


async def _receive(address: str, addresses: Addresses, group: WeightGroup, rank: int) -> _Outcome:
    client = Client(address, rollout_pb2_grpc.RolloutServiceStub, addresses.transport)
    request = rollout_pb2.ReceiveTestBroadcastRequest(group=group, rank=rank)
    try:
        return await _outcome_or_error(client.call(_Rollout.ReceiveTestBroadcast, request, timeout_s=_CALL_TIMEOUT_S))
    finally:
        await client.close()


def _finding(tried: _BroadcastResult, address: str) -> Finding:
    check, group, sent, received = f"broadcast to {address}", tried.group, tried.sent, tried.received[address]
    if isinstance(sent, LockstepError) or isinstance(received, LockstepError):
        fix = f"open port {group.store_port} of {group.store_host}, the rendezvous port, and all TCP ports between "
        fix += f"the trainer {group.store_host}{_interface(sent)} and rollout {address}{_interface(received)}"
        fix += "; set NCCL_SOCKET_IFNAME to that interface on both" if group.backend == "nccl" else ""
        return Finding(check, _messages(tried.errors), Verdict.FAIL, fix)
    result = f"{_rate(received)}, by {group.backend} from {sent.route} to {received.route}"
    if sent.digest != received.digest:
        fix = "look for bad memory or a bad link on either host"
        return Finding(check, f"{result}: the bytes differ from those sent", Verdict.FAIL, fix)
    return Finding(check, result)


def _interface(end: _Outcome) -> str:
    route = end.metadata.get("route", "") if isinstance(end, LockstepError) else end.route
    return f", which uses interface {route}" if route else ""


def _rate(received: TestBroadcast) -> str:
    per_s = received.num_bytes / received.duration_s / 1e9
    return f"{received.num_bytes >> 20} MiB in {received.duration_s:.3f} s, {per_s:.1f} GB/s"


def _messages(errors: Sequence[LockstepError]) -> str:
    return "; ".join(dict.fromkeys(error.message for error in errors))


_NUM_CALLS = 5
_TIMEOUT_S = 5.0
_SLOW_S = 0.05
_SKEW_WARN_S, _SKEW_FAIL_S = 1.0, 300.0
# A run fails with different versions of the first group, and may compute different results with those of the second.
_MUST_AGREE, _SHOULD_AGREE = ("lockstep-rl", "nccl"), ("torch", "cuda", "transformers")

_Kind = tuple[type, Any, Message]
"""Stub, method GetInfo and its request."""
_TRAINER: _Kind = (trainer_pb2_grpc.TrainerServiceStub, _Trainer.GetInfo, trainer_pb2.GetInfoRequest())
"""The policy's trainer; the other models may have trainers of their own."""
_KINDS: Mapping[str, _Kind] = {
    "rollout": (rollout_pb2_grpc.RolloutServiceStub, _Rollout.GetInfo, rollout_pb2.GetInfoRequest()),
    "reward": (
        reward_pb2_grpc.RewardServiceStub,
        reward_pb2_grpc.RewardServiceServicer.GetInfo,
        reward_pb2.GetInfoRequest(),
    ),
}


@dataclass(frozen=True)
class Answer:
    """A service's answer to GetInfo, the fastest call's latency, and how far its clock is ahead of ours."""

    info: ServiceInfo
    latency_s: float
    ahead_s: float


async def examine_services(addresses: Addresses) -> list[Finding]:
    named = addresses.named
    answers = await gather(_ask(_KINDS.get(name, _TRAINER), address, addresses.transport) for name, address in named)
    findings, infos = [], {}
    for (kind, address), answer in zip(named, answers, strict=True):
        name = f"{kind} {address}"
        findings.append(check_answer(name, answer))
        if isinstance(answer, Answer):
            findings.append(check_clock(name, answer))
            infos[name] = answer.info
    findings += check_agreement(infos)
    if addresses.trainer and addresses.rollout:
        findings += await check_publication(addresses, infos)
    return findings


async def _ask(kind: _Kind, address: str, transport: Transport) -> Answer | LockstepError:
    stub, method, request = kind
    client = Client(address, stub, transport)
    answers = []
    try:
        for _ in range(1 + _NUM_CALLS):  # the first call also connects, so it is not counted
            began, clock = time.perf_counter(), time.time()
            info = (await client.call(method, request, timeout_s=_TIMEOUT_S)).info
            took_s = time.perf_counter() - began
            answers.append(Answer(info, took_s, info.time_ns / 1e9 - clock - took_s / 2))
    except LockstepError as error:
        return error
    finally:
        await client.close()
    # The clock's error is at most half the latency, so the fastest call measures it best.
    return min(answers[1:], key=lambda answer: answer.latency_s)


def check_answer(name: str, answer: Answer | LockstepError) -> Finding:
    """Checks that the service is reachable, of the expected kind, and answers fast."""
    if isinstance(answer, LockstepError):
        return Finding(name, answer.message, Verdict.FAIL, _advice_for(answer))
    info = answer.info
    result = f"{info.state}, {answer.latency_s * 1e3:.1f} ms, " + (f"run {info.run_id}" if info.run_id else "no run")
    if answer.latency_s > _SLOW_S:
        return Finding(name, result, Verdict.WARN, "use a host with lower latency: a step makes thousands of calls")
    return Finding(name, result)


def _advice_for(error: LockstepError) -> str:
    match error:
        case Unauthenticated():
            return (
                "give both sides certificates of the same authority, each valid for its own host and for both key "
                "usages, clientAuth and serverAuth (`lockstep certs` makes such), or use none on both"
            )
        case InvalidInput():
            return "check the address: those of trainer, rollout and reward may be swapped"
    return "start the service, and check its address and any firewall in between"


def check_clock(name: str, answer: Answer) -> Finding:
    """Checks that the service's clock agrees with this host's, as certificates, logs and traces depend on it."""
    check, skew_s = f"clock of {name}", abs(answer.ahead_s)
    result = f"{answer.ahead_s:+.3f} s, give or take {answer.latency_s / 2:.3f} s"
    if skew_s < _SKEW_WARN_S:
        return Finding(check, result)
    verdict = Verdict.FAIL if skew_s >= _SKEW_FAIL_S else Verdict.WARN
    return Finding(check, result, verdict, "synchronize the clocks of both hosts with chrony or systemd-timesyncd")


def check_agreement(infos: Mapping[str, ServiceInfo]) -> Iterator[Finding]:
    """Checks that all services have the same versions of libraries that affect their results or communication."""
    versions = {name: {"lockstep-rl": info.version, **info.libraries} for name, info in infos.items()}
    if len(versions) < 2:
        return
    for library in (*_MUST_AGREE, *_SHOULD_AGREE):
        by_version: dict[str, list[str]] = {}
        for name, libraries in versions.items():
            if library in libraries:
                by_version.setdefault(libraries[library], []).append(name)
        if len(by_version) > 1:
            result = "; ".join(f"{version} in {', '.join(names)}" for version, names in by_version.items())
            verdict = Verdict.FAIL if library in _MUST_AGREE else Verdict.WARN
            yield Finding(f"{library} versions", result, verdict, f"install the same {library} everywhere")
        elif by_version:
            yield Finding(f"{library} versions", next(iter(by_version)))


_BROADCAST_TIMEOUT_S = 30.0


async def check_broadcast(receiver: Sequence[str] = (), *, timeout_s: float = _BROADCAST_TIMEOUT_S) -> Finding:
    """Checks that a second process (Python with arguments `receiver`, if given) receives the bytes that one sends."""
    from services.common.weights.store import ServedStore  # these import torch
    from services.common.weights.trial import take_part, trial_group

    group = trial_group(ServedStore("127.0.0.1").address, num_receivers=1, timeout_s=timeout_s)
    group.backend = "gloo"  # which every build of torch has, and which needs no GPU
    fix = "check that loopback is up and that this torch is built with gloo"
    try:
        sent, received = await gather([take_part(group, 0), take_part(group, 1, *([receiver] if receiver else []))])
    except LockstepError as error:
        return Finding("broadcast", error.message, Verdict.FAIL, fix)
    if sent.digest != received.digest:
        return Finding("broadcast", f"sent {sent.digest}, received {received.digest}", Verdict.FAIL, fix)
    result = f"{_rate(received)}, by gloo between two processes of this host"
    return Finding("broadcast", f"{result}; pass --trainer and --rollout to test between them")
