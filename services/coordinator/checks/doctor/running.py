"""Checks running services: whether they answer, their latency, clocks and library versions."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.reward.v1 import reward_pb2
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceStub
from lockstep.rollout.v1 import rollout_pb2
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceStub
from lockstep.trainer.v1 import trainer_pb2
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceStub
from lockstep.types.v1.types_pb2 import ServiceInfo

from services.common.errors import InvalidInput, LockstepError, Unauthenticated
from services.common.rpc.client import Client
from services.common.rpc.security.tls import Transport
from services.common.tasks import gather
from services.coordinator.checks.doctor.finding import Finding, Verdict
from services.coordinator.checks.doctor.publication import check_publication
from services.coordinator.services.launch import Addresses

_NUM_CALLS = 5
_TIMEOUT_S = 5.0
_SLOW_S = 0.05
_SKEW_WARN_S, _SKEW_FAIL_S = 1.0, 300.0
# A run fails with different versions of the first group, and may compute different results with those of the second.
_MUST_AGREE, _SHOULD_AGREE = ("lockstep-rl", "nccl"), ("torch", "cuda", "transformers")

_TRAINER = (TrainerServiceStub, TrainerService.GetInfo, trainer_pb2.GetInfoRequest())
"""The policy's trainer; a reference or a critic may have a trainer of its own."""
_KINDS = {
    "rollout": (RolloutServiceStub, RolloutService.GetInfo, rollout_pb2.GetInfoRequest()),
    "reward": (RewardServiceStub, RewardService.GetInfo, reward_pb2.GetInfoRequest()),
}


@dataclass(frozen=True)
class Answer:
    """Holds a service's answer to GetInfo, the fastest call's latency, and how far its clock is ahead of ours."""

    info: ServiceInfo
    latency_s: float
    ahead_s: float


async def examine_services(given: Addresses) -> list[Finding]:
    """Runs all checks of the services at `given`."""
    several = [(kind, one) for kind, these in (("reward", given.reward), ("rollout", given.rollout)) for one in these]
    there = [(name, address) for name, address in (*given.trainers.items(), *several) if address]
    answers = await gather(_ask(_KINDS.get(name, _TRAINER), address, given.transport) for name, address in there)
    findings, infos = [], {}
    for (kind, address), answer in zip(there, answers, strict=True):
        name = f"{kind} {address}"
        findings.append(check_answer(name, answer))
        if isinstance(answer, Answer):
            findings.append(check_clock(name, answer))
            infos[name] = answer.info
    findings += check_agreement(infos)
    if given.trainer and given.rollout:
        findings += await check_publication(given, infos)
    return findings


async def _ask(kind: tuple[Any, Any, Any], address: str, transport: Transport) -> Answer | LockstepError:
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
    return min(answers[1:], key=lambda answer: answer.latency_s)


def check_answer(name: str, answer: Answer | LockstepError) -> Finding:
    """Checks that the service is reachable, of the expected kind, and answers fast."""
    if isinstance(answer, LockstepError):
        return Finding(name, answer.message, Verdict.FAIL, _fix(answer))
    info = answer.info
    found = f"{info.state}, {answer.latency_s * 1e3:.1f} ms, " + (f"run {info.run_id}" if info.run_id else "no run")
    if answer.latency_s > _SLOW_S:
        return Finding(name, found, Verdict.WARN, "use a host with lower latency: a step makes thousands of calls")
    return Finding(name, found)


def _fix(error: LockstepError) -> str:
    match error:
        case Unauthenticated():
            return "give both sides certificates of the same authority (`lockstep certs`), or use none on both"
        case InvalidInput():
            return "check the address: those of trainer, rollout and reward may be swapped"
    return "start the service, and check its address and any firewall in between"


def check_clock(name: str, answer: Answer) -> Finding:
    """Checks that the service's clock agrees with this host's, as certificates, logs and traces depend on it."""
    check = f"clock of {name}"
    if not answer.info.time_ns:
        return Finding(check, "not reported", Verdict.WARN, "the service runs an older version of lockstep: update it")
    ahead_s = answer.ahead_s
    found = f"{ahead_s:+.3f} s, give or take {answer.latency_s / 2:.3f} s"
    if abs(ahead_s) < _SKEW_WARN_S:
        return Finding(check, found)
    verdict = Verdict.FAIL if abs(ahead_s) >= _SKEW_FAIL_S else Verdict.WARN
    return Finding(check, found, verdict, "synchronize the clocks of both hosts with chrony or systemd-timesyncd")


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
            found = "; ".join(f"{version} in {', '.join(names)}" for version, names in by_version.items())
            verdict = Verdict.FAIL if library in _MUST_AGREE else Verdict.WARN
            yield Finding(f"{library} versions", found, verdict, f"install the same {library} everywhere")
        elif by_version:
            yield Finding(f"{library} versions", next(iter(by_version)))
