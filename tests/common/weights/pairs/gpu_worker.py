"""An engine worker's end of a pair on a GPU, in a process of its own.

`python -m tests.common.weights.pairs.gpu_worker` reads a WeightGroup message and a WeightPlan message in hexadecimal
from the first line of its standard input and joins. For every further line, a version, it receives a publication and
answers with a line: the digest, the seconds that it took, and whether its copy has the digest too. By then it has freed
what it does not need any more.
"""

import json
import sys
import time

import torch
from lockstep.types.v1.types_pb2 import WeightGroup, WeightPlan

from services.common.weights.buckets import WeightDigest
from services.common.weights.pairs import PairReceiver
from services.common.weights.plan import Plan

GPU = torch.device("cuda", 0)


def main() -> None:
    group, plan_message = map(bytes.fromhex, sys.stdin.readline().split())
    message, plan = WeightGroup.FromString(group), Plan(WeightPlan.FromString(plan_message))
    member = PairReceiver(message, rank=1, device=GPU)
    copies = [torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=GPU) for bucket in plan.buckets]
    for line in sys.stdin:
        torch.cuda.synchronize()
        begin, received = time.perf_counter(), WeightDigest(plan.digest, GPU)
        arriving = member.receive(plan.buckets, in_place=True)
        for copy, (bucket, flat) in zip(copies, arriving, strict=True):
            received.update(flat, start=bucket.start)
            copy.copy_(flat)
        digest = received.hexdigest()
        torch.cuda.synchronize()
        member.acknowledge(int(line), digest)
        seconds, own_digest = time.perf_counter() - begin, WeightDigest(plan.digest, GPU)
        for copy, bucket in zip(copies, plan.buckets, strict=True):
            own_digest.update(copy, start=bucket.start)
        answer = {"digest": digest, "seconds": seconds, "is_held": own_digest.hexdigest() == digest}
        torch.cuda.empty_cache()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    member.abort()


if __name__ == "__main__":
    main()
