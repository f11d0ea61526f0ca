"""Tests a weight broadcast between two processes of this host, for when no running services are given."""

from collections.abc import Sequence

from services.common.errors import LockstepError
from services.common.tasks import gather
from services.common.weights.store import ServedStore
from services.common.weights.trial import take_part, trial_group
from services.coordinator.checks.doctor.finding import Finding, Verdict, rate

_TIMEOUT_S = 30.0


async def check_broadcast(receiver: Sequence[str] = (), *, timeout_s: float = _TIMEOUT_S) -> Finding:
    """Checks that a second process (Python with arguments `receiver`, if given) receives the bytes that one sends."""
    group = trial_group(ServedStore("127.0.0.1").address, num_receivers=1, timeout_s=timeout_s)
    group.backend = "gloo"
    fix = "check that loopback is up and that this torch is built with gloo"
    try:
        sent, received = await gather([take_part(group, 0), take_part(group, 1, *([receiver] if receiver else []))])
    except LockstepError as error:
        return Finding("broadcast", error.message, Verdict.FAIL, fix)
    if sent.digest != received.digest:
        return Finding("broadcast", f"sent {sent.digest}, received {received.digest}", Verdict.FAIL, fix)
    found = f"{rate(received)}, by gloo between two processes of this host"
    return Finding("broadcast", f"{found}; pass --trainer and --rollout to test between them")
