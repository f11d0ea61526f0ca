"""Broadcasts random bytes with the weight group's own code, to test whether a publication would succeed.

Each member takes part in a process of its own, as engine workers do. So it leaves no memory allocated on a GPU, and it
can be killed if it hangs.
"""

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Sequence

import torch
from lockstep.types.v1 import types_pb2

from services.common.errors import Aborted, InvalidInput, LockstepError
from services.common.process import exit_with
from services.common.rpc.address import route_to
from services.common.weights.buckets import WeightDigest
from services.common.weights.group import WeightGroup
from services.common.weights.store import ONLY_IPV4, StoreAddress

NUM_BYTES = 64 << 20
_COMMAND = ("-W", "ignore", "-m", "services.common.weights.trial")
# _START_S is for starting Python with torch. A member waits up to _NUM_WAITS times, each with its own timeout: for the
# store, the other members, their connections, the first collective, two broadcasts, and the end.
_START_S, _MAX_TIMEOUT_S, _NUM_WAITS = 60.0, 600.0, 7


def trial_group(store: StoreAddress, *, num_receivers: int, timeout_s: float) -> types_pb2.WeightGroup:
    """Returns a group for one test broadcast, between GPUs if this process has any."""
    if num_receivers < 1:
        raise InvalidInput("num_receivers: must be 1 or more", field="num_receivers")
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise InvalidInput(f"timeout_s: must be above 0 and at most {_MAX_TIMEOUT_S:g}", field="timeout_s")
    return types_pb2.WeightGroup(
        run_id=f"trial-{secrets.token_hex(8)}",
        epoch=1,
        store_host=store.host,
        store_port=store.port,
        store_secret=store.secret,
        world_size=1 + num_receivers,
        backend="nccl" if torch.cuda.is_available() else "gloo",
        timeout_s=timeout_s,
    )


async def take_part(
    group: types_pb2.WeightGroup, rank: int, command: Sequence[str] = _COMMAND
) -> types_pb2.TestBroadcast:
    """Takes part in the broadcast as member `rank`; rank 0 is the sender. Canceling the call kills the process.

    Raises:
        Aborted: The broadcast failed, or a member waited too long. Its metadata has `route`, the route from this host
            to the store's host.
    """
    try:
        route = str(route_to(group.store_host))
    except OSError as error:
        why = ONLY_IPV4 if group.store_host.startswith("[") else f"cannot be resolved on this host: {error}"
        raise Aborted(f"{group.store_host}: {why}", route="none") from error
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(_START_S + _NUM_WAITS * min(group.timeout_s, _MAX_TIMEOUT_S)):
            output, errors = await process.communicate(f"{rank} {group.SerializeToString().hex()}\n".encode())
    except TimeoutError as error:
        raise Aborted("the process of the test broadcast did not end and was killed", route=route) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        why = errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        raise Aborted(why[-1], route=route)
    outcome = types_pb2.TestBroadcast.FromString(output)
    outcome.route = route
    return outcome


def _broadcast(group: types_pb2.WeightGroup, rank: int) -> types_pb2.TestBroadcast:
    device = torch.device("cuda", 0) if group.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("the trainer broadcasts from a GPU, but torch finds no GPU here", field="backend")
    # Receivers begin with zeros: random numbers below 1.
    flat, again = (torch.randint(1 if rank else 256, (NUM_BYTES,), dtype=torch.uint8, device=device) for _ in range(2))
    member = WeightGroup(group, rank=rank, device=device)
    try:
        member.wait(member.broadcast(flat))  # warms up: establishes all connections
        begin = time.perf_counter()
        member.wait(member.broadcast(again))
        duration_s = time.perf_counter() - begin
        digest = WeightDigest("trial", device)
        digest.update(again, start=0)
        # Keeps every member until all have received. The result is not used: the caller compares the digests.
        member.agrees(digest.sums())
    finally:
        member.abort()
    return types_pb2.TestBroadcast(digest=digest.hexdigest(), num_bytes=NUM_BYTES, duration_s=duration_s)


def main() -> None:
    """Takes part as the one line on stdin says; writes the result to stdout, or why there is none to stderr."""
    exit_with(os.getppid())
    result = os.dup(1)
    os.dup2(2, 1)  # what libraries such as NCCL print must not mix with the result
    rank, message = sys.stdin.readline().split()
    torch.set_num_threads(1)
    code = 0
    try:
        outcome = _broadcast(types_pb2.WeightGroup.FromString(bytes.fromhex(message)), int(rank))
        os.write(result, outcome.SerializeToString())
    except Exception as error:  # noqa: BLE001  the edge of this process
        why = error.message if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}"
        sys.stderr.write("\n" + " ".join(why.split()))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for a broken gloo group


if __name__ == "__main__":
    main()
