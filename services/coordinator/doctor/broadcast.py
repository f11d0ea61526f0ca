"""A broadcast by the weight group's own code between two processes of this host.

One between a trainer and its replicas needs an open run, which a look at them must not begin.
"""

import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from lockstep.types.v1 import types_pb2

from services.common.errors import LockstepError, PreconditionFailed, Reason
from services.common.weights.digest import WeightDigest
from services.common.weights.group import WeightGroup
from services.common.weights.store import ServedStore, StoreAddress
from services.coordinator.doctor.finding import Finding, Verdict

_HOST, _VERSION = "127.0.0.1", 1
_NUM_BYTES = 64 << 20
_CPU = torch.device("cpu")
_TIMEOUT_S = 60.0


def check_broadcast(
    other: Sequence[str] = ("-m", "services.coordinator.doctor.broadcast"), *, timeout_s: float = _TIMEOUT_S
) -> Finding:
    """What one process sends is what the `other`, told the store's port and secret on its input, receives."""
    store = ServedStore(_HOST).address
    command = [sys.executable, "-W", "ignore", *other]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin
    process.stdin.write(f"{store.port} {store.secret.hex()}\n")
    process.stdin.flush()
    duration_s, why = 0.0, ""
    try:
        duration_s = _send(store, timeout_s)
    except LockstepError as error:
        why = error.message
    finally:
        process.kill()
        said = process.communicate()[1].strip().splitlines()[-1:]
    if why:
        fix = "see that loopback is up and that this torch has gloo"
        return Finding("broadcast", "; ".join([why, *said]), Verdict.FAIL, fix)
    rate = _NUM_BYTES / duration_s / 1e9
    found = f"64 MiB in {duration_s:.3f} s, {rate:.1f} GB/s, by gloo between two processes of this host"
    return Finding("broadcast", f"{found}; from trainer to replicas it would need an open run")


def _send(store: StoreAddress, timeout_s: float) -> float:
    """Seconds of the broadcast.

    Raises:
        Aborted: The other did not come, or left.
        PreconditionFailed: It received something else.
    """
    flat = torch.randint(256, (_NUM_BYTES,), dtype=torch.uint8)
    group = _join(store, 0, timeout_s)
    try:
        begin = time.perf_counter()
        group.wait(group.broadcast(flat))
        duration_s = time.perf_counter() - begin
        sent, received = _digest(flat), group.acknowledged(_VERSION)
    finally:
        group.abort()
    if received != [sent]:
        raise PreconditionFailed(f"sent {sent}, received {received}", reason=Reason.DIGEST_MISMATCH)
    return duration_s


def _receive(store: StoreAddress) -> None:
    flat, group = torch.empty(_NUM_BYTES, dtype=torch.uint8), _join(store, 1, _TIMEOUT_S)
    group.wait(group.broadcast(flat))
    group.acknowledge(_VERSION, _digest(flat))


def _join(store: StoreAddress, rank: int, timeout_s: float) -> WeightGroup:
    group = types_pb2.WeightGroup(
        run_id="doctor",
        epoch=1,
        store_host=store.host,
        store_port=store.port,
        store_secret=store.secret,
        world_size=2,
        backend="gloo",
        timeout_s=timeout_s,
    )
    return WeightGroup(group, rank=rank, device=_CPU)


def _digest(flat: torch.Tensor) -> str:
    digest = WeightDigest("doctor", _CPU)
    digest.update(flat, start=0)
    return digest.hexdigest()


def main() -> None:
    """The other process."""
    port, secret = sys.stdin.readline().split()
    _receive(StoreAddress(_HOST, int(port), bytes.fromhex(secret)))


if __name__ == "__main__":
    main()
