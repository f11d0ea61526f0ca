"""Creates members of a weight group: threads of this process, or a process of its own when it is run as a program.

`python -m tests.common.weights.group_harness` writes `{}` once it has imported what it needs. Then it obeys one JSON
object per line of its standard input: `{"epoch", "rank", "world_size", "port", "secret", "timeout_s", "receive"}`. It
joins the group and, unless "receive" is null, receives a publication; with `"pairs"`, as the engine worker of a pair.
It answers joining and receiving with a line each, and a failure with a line that has the error.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from lockstep.types.v1.types_pb2 import WeightGroup as GroupMessage

from services.common.errors import LockstepError
from services.common.weights.buckets import WeightDigest, pack, unpack
from services.common.weights.group import WeightGroup
from services.common.weights.pairs import PairReceiver
from services.common.weights.plan import Plan
from services.common.weights.store import StoreAddress

CPU = torch.device("cpu")
_members: list[PairReceiver] = []
NamedTensor = tuple[str, torch.Tensor]


def some_weights(num_large: int = 4, large: int = 1 << 16) -> list[NamedTensor]:
    """Returns weights of several dtypes and shapes, among them odd sizes and a scalar."""
    generator = torch.Generator().manual_seed(0)
    weights = [("scalar", torch.tensor(1.5)), ("odd", torch.randn(7, generator=generator).bfloat16())]
    weights += [(f"large.{i}", torch.randn(large, generator=generator)) for i in range(num_large)]
    return [*weights, ("bytes", torch.arange(5, dtype=torch.uint8))]


def message(store: StoreAddress, *, epoch: int, world_size: int, timeout_s: float = 30.0) -> GroupMessage:
    return GroupMessage(
        run_id="test",
        epoch=epoch,
        store_host=store.host,
        store_port=store.port,
        store_secret=store.secret,
        world_size=world_size,
        backend="gloo",
        timeout_s=timeout_s,
    )


def join_all(pool: ThreadPoolExecutor, group: GroupMessage, ranks: Sequence[int]) -> list[Future[WeightGroup]]:
    """Makes each of `ranks` join the group in a thread of its own."""
    return [pool.submit(WeightGroup, group, rank=rank, device=CPU) for rank in ranks]


def receive(group: WeightGroup, plan: Plan, version: int) -> tuple[str, list[NamedTensor]]:
    """Receives and acknowledges a publication, and returns its digest and the weights."""
    digest, weights = WeightDigest(plan.digest, CPU), []
    for bucket in plan.buckets:
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        group.wait(group.broadcast(flat, bucket.sender))
        digest.update(flat, start=bucket.start)
        weights += unpack(bucket, flat)
    group.acknowledge(version, digest.hexdigest())
    return digest.hexdigest(), weights


def receive_pair(
    group: PairReceiver, plan: Plan, version: int, *, in_place: bool = False
) -> tuple[str, list[NamedTensor]]:
    """Receives and acknowledges a publication as an engine worker of a pair does."""
    digest, weights = WeightDigest(plan.digest, CPU), []
    for bucket, flat in group.receive(plan.buckets, in_place=in_place):
        digest.update(flat, start=bucket.start)
        weights += unpack(bucket, flat.clone() if in_place else flat)
    group.acknowledge(version, digest.hexdigest())
    return digest.hexdigest(), weights


def digest_of(plan: Plan, weights: Sequence[NamedTensor]) -> str:
    digest = WeightDigest(plan.digest, CPU)
    for bucket, flat in pack(plan, weights, CPU):
        digest.update(flat, start=bucket.start)
    return digest.hexdigest()


def _obey(commands: Iterator[str]) -> Iterator[dict[str, Any]]:
    yield {}
    for line in commands:
        order = json.loads(line)
        store = StoreAddress("127.0.0.1", order["port"], bytes.fromhex(order["secret"]))
        described = message(store, epoch=order["epoch"], world_size=order["world_size"], timeout_s=order["timeout_s"])
        try:
            if num_trainer_ranks := order.get("pairs"):
                described.backend, described.num_trainer_ranks = "pairs", num_trainer_ranks
                yield from _obey_pair(described, order)
                continue
            group = WeightGroup(described, rank=order["rank"], device=CPU)
            yield {"joined": order["epoch"]}
            if not order["receive"]:
                continue
            plan = Plan.of(some_weights(**order["receive"]), bucket_bytes=1 << 20)
            yield {"digest": receive(group, plan, version=order["epoch"])[0]}
        except LockstepError as error:
            yield {"error": error.reason.value, "message": error.message}


def _obey_pair(described: GroupMessage, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    group = PairReceiver(described, rank=order["rank"], device=CPU)
    _members.append(group)  # its end of the pair would close if the object were freed
    yield {"joined": order["epoch"]}
    if order["receive"]:
        plan = Plan.of(some_weights(**order["receive"]), bucket_bytes=1 << 20)
        yield {"digest": receive_pair(group, plan, version=order["epoch"])[0]}
        group.abort()


if __name__ == "__main__":
    for answer in _obey(sys.stdin):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
