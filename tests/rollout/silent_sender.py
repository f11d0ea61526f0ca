"""A trainer that sends its first bucket and then nothing: PLAN_FILE RUN_ID EPOCH TIMEOUT_S."""

import sys
import threading
from pathlib import Path

import torch
from lockstep.types.v1 import types_pb2

from services.common.weights.group import WeightGroup
from services.common.weights.plan import Plan
from services.common.weights.store import ServedStore


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(plan_file: str, run_id: str, epoch: str, timeout_s: str) -> None:
    plan = Plan(types_pb2.WeightPlan.FromString(Path(plan_file).read_bytes()))
    store = ServedStore("127.0.0.1").address
    say(store.port)
    say(store.secret.hex())
    message = types_pb2.WeightGroup(
        run_id=run_id,
        epoch=int(epoch),
        store_host="127.0.0.1",
        store_port=store.port,
        store_secret=store.secret,
        world_size=2,
        backend="gloo",
        timeout_s=float(timeout_s),
    )
    group = WeightGroup(message, rank=0, device=torch.device("cpu"))
    group.wait(group.broadcast(torch.zeros(plan.buckets[0].num_bytes, dtype=torch.uint8)))
    say("first bucket sent")
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
