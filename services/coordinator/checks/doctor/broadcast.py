"""A broadcast by the weight group's own code between two processes of this host, where no services are to be asked."""

from collections.abc import Sequence

from services.common.errors import LockstepError
from services.common.tasks import gather
from services.common.weights.store import ServedStore
from services.common.weights.trial import take_part, trial_group
from services.coordinator.checks.doctor.finding import Finding, Verdict, rate

_TIMEOUT_S = 30.0


async def check_broadcast(receiver: Sequence[str] = (), *, timeout_s: float = _TIMEOUT_S) -> Finding:
    """What one process sends is what another, or what `receiver` makes of Python, receives."""
    group = trial_group(ServedStore("127.0.0.1").address, num_receivers=1, timeout_s=timeout_s)
    group.backend = "gloo"
    fix = "see that loopback is up and that this torch has gloo"
    try:
        sent, received = await gather([take_part(group, 0), take_part(group, 1, *([receiver] if receiver else []))])
    except LockstepError as error:
        return Finding("broadcast", error.message, Verdict.FAIL, fix)
    if sent.digest != received.digest:
        return Finding("broadcast", f"sent {sent.digest}, received {received.digest}", Verdict.FAIL, fix)
    found = f"{rate(received)}, by gloo between two processes of this host"
    return Finding("broadcast", f"{found}; with --trainer and --rollout it is between them")
