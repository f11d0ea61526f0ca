"""Tests a pair on one GPU: two processes, CUDA IPC, and the bytes of a model of 0.6 billion weights."""

import json
import logging
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from services.common.errors import Aborted
from services.common.weights import pair_link as link
from services.common.weights import pairs as sender_module
from services.common.weights.buckets import WeightDigest, pack
from services.common.weights.pair_link import NUM_BUFFERS
from services.common.weights.pairs import PairSender
from services.common.weights.plan import Plan
from services.common.weights.store import ServedStore
from services.trainer.ranks.publish import Publication, send
from tests.common.weights.group_harness import message
from tests.support import PATIENCE_S

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = torch.device("cuda", 0)
BUCKET_BYTES, NUM_PUBLICATIONS = 256 << 20, 8
CONTEXT_BYTES = 1 << 30  # 0.65 GB on an H100
log = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def weights() -> list[tuple[str, torch.Tensor]]:
    """Provides weights with the shapes of Qwen3-0.6B, and with some that leave gaps in a bucket."""
    torch.manual_seed(0)
    shapes = [("embed", (151936, 1024)), ("scalar", ()), ("odd", (7,))]
    parts = {"q": (2048, 1024), "k": (1024, 1024), "v": (1024, 1024), "o": (1024, 2048), "norm": (1024,)}
    parts |= {"gate": (3072, 1024), "up": (3072, 1024), "down": (1024, 3072)}
    shapes += [(f"{layer}.{name}", shape) for layer in range(28) for name, shape in parts.items()]
    return [(name, torch.randn(shape, device=GPU).bfloat16()) for name, shape in shapes]


class Pair:
    """Pairs a trainer rank in this process with an engine worker in a process of its own, on the same GPU."""

    def __init__(self, store: ServedStore, plan: Plan, epoch: int, timeout_s: float = 60.0):
        self.plan = plan
        group = message(store.address, epoch=epoch, world_size=2, timeout_s=timeout_s)
        group.backend, group.num_trainer_ranks = "pairs", 1
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.common.weights.pairs.gpu_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._write(f"{group.SerializeToString().hex()} {plan.message.SerializeToString().hex()}")
        self.sender = PairSender(group, rank=0, device=GPU, senders=[0], spread=lambda flat, sender: None)

    def publish(self, weights: list[tuple[str, torch.Tensor]], version: int) -> tuple[Publication, dict]:
        self._write(str(version))
        publication = send(self.sender, self.plan, weights, version=version)
        assert self.process.stdout
        return publication, json.loads(self.process.stdout.readline())

    def _write(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.sender.abort()
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.end()


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_arrives_is_what_was_sent(weights, pairs, monkeypatch, is_kept) -> None:
    monkeypatch.setattr(link, "_KEPT_SHARE", 1 if is_kept else 0)
    plan = Plan.of(weights, bucket_bytes=BUCKET_BYTES)
    expected = WeightDigest(plan.digest, GPU)
    for bucket, flat in pack(plan, weights, GPU):
        expected.update(flat, start=bucket.start)
    pair = Pair(ServedStore("127.0.0.1"), plan, 1, PATIENCE_S)
    pairs.append(pair)
    seconds, free_bytes = [], []
    torch.cuda.empty_cache()
    free_before = torch.cuda.mem_get_info(GPU)[0]
    for version in range(1, NUM_PUBLICATIONS + 1):
        publication, answer = pair.publish(weights, version)
        assert publication.digest == answer["digest"] == expected.hexdigest()
        assert answer["is_held"]
        seconds.append((publication.duration_s, answer["seconds"]))
        torch.cuda.empty_cache()
        free_bytes.append(torch.cuda.mem_get_info(GPU)[0])
    # All processes count in the GPU's free memory: since the first publication, the worker has copies of the weights, a
    # CUDA context, kernels and its digest's scratch memory.
    most = max(bucket.num_bytes for bucket in plan.buckets)
    kept_bytes = NUM_BUFFERS * most if is_kept else 0
    assert kept_bytes <= free_before - free_bytes[0] < plan.num_bytes + CONTEXT_BYTES + kept_bytes
    assert free_bytes[0] - min(free_bytes) < BUCKET_BYTES // 4
    assert (pair.sender._buffers is not None) == is_kept
    sent, received = (statistics.median(column) for column in zip(*seconds[1:], strict=True))
    log.warning(
        "%.2f GB: sent in %.1f ms, received in %.1f ms", publication.num_bytes / 1e9, sent * 1e3, received * 1e3
    )
    log.warning("all, in ms: %s", [[round(1e3 * value, 1) for value in pair] for pair in seconds])


def test_other_bytes_arrive_in_the_next_publication(weights, pairs) -> None:
    pair = Pair(ServedStore("127.0.0.1"), Plan.of(weights, bucket_bytes=BUCKET_BYTES), 1, PATIENCE_S)
    pairs.append(pair)
    first = pair.publish(weights, 1)[1]["digest"]
    second, answer = pair.publish([(name, tensor + 1) for name, tensor in weights], 2)
    assert first != second.digest == answer["digest"]
    assert answer["is_held"]


def test_a_killed_worker_is_noticed_and_its_memory_is_freed_later(weights, pairs) -> None:
    store, plan = ServedStore("127.0.0.1"), Plan.of(weights, bucket_bytes=BUCKET_BYTES)
    pair = Pair(store, plan, 1)
    pairs.append(pair)
    pair.publish(weights, 1)
    pair.process.send_signal(signal.SIGSTOP)
    pair.sender._timeout_s = 2.0
    with pytest.raises(Aborted, match=r"waited 2 s for member 1 to (map the buffers|read a bucket)"):
        send(pair.sender, plan, weights, version=2)
    assert len(sender_module._graveyard) == 1
    pair.process.send_signal(signal.SIGKILL)
    again = Pair(store, plan, 2, PATIENCE_S)
    pairs.append(again)
    assert not sender_module._graveyard
    publication, answer = again.publish(weights, 2)
    assert publication.digest == answer["digest"]
