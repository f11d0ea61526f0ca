"""A trainer of two ranks in two processes: the real servicer, commands and checkpoints, around a toy policy."""

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.types.v1.types_pb2 import DeviceMemory, WeightGroup, WeightPlan

from services.common import batches
from services.common.batches import content_sha256
from services.common.errors import Aborted, InternalError, Reason
from services.common.rpc.command import ServeOptions
from services.common.rpc.server import Server
from services.common.weights.store import ServedStore
from services.trainer.checkpoint import manifest as checkpoint
from services.trainer.ranks.calls import Message, Ranks, RanksAddress, follow, rank_command
from services.trainer.servicer import NAME, TrainerServicer
from tests.campaign.policy import MODEL_WEIGHTS, after, digest_of, logprobs, name_of

_NUM_RANKS = 2


class ToyRank:
    """One rank. Every rank has the whole policy, and computes log-probabilities again before it trains."""

    def __init__(self, rank: int, store: ServedStore | None):
        self._rank, self._store = rank, store
        self._held, self._lag = [MODEL_WEIGHTS], 0  # the newest weights first, and those that samples may come from
        self._added = b""
        self._group = WeightGroup()
        self._killed = threading.Event()

    @property
    def _weights(self) -> bytes:
        return self._held[0]

    @rank_command
    def open(self, *, role: str, config_json: str, checkpoint_path: str, **_: Any) -> Message:
        self._held, self._lag = [MODEL_WEIGHTS], json.loads(config_json)["lag"]["versions"]
        if checkpoint_path:
            content = (Path(checkpoint_path) / "state" / "weights").read_bytes()
            self._held = [content[begin : begin + 32] for begin in range(0, len(content), 32)]
        return Message({"data_rank": 0, "pads_rows": False}, [WeightPlan(num_senders=1).SerializeToString()])

    @rank_command
    def begin_batch(self, **_: Any) -> None:
        self._added = b""

    @rank_command
    def add_block(self, *, frames: Sequence[bytes], **_: Any) -> None:
        samples = batches.decode(frames)
        found = [
            (token, value)
            for tokens, values in zip(samples["tokens"].to_pylist(), samples["logprobs"].to_pylist(), strict=True)
            for token, value in zip(tokens, values, strict=True)
            if value  # an environment's tokens have none
        ]
        tokens, values = [token for token, _ in found], [value for _, value in found]
        if not any(values == logprobs(weights, tokens) for weights in self._held):
            raise InternalError("a batch was not drawn from the weights that are trained")
        self._added += content_sha256(samples)

    @rank_command
    def apply_batch(self, **_: Any) -> Message:
        self._held = [after(self._weights, self._added), *self._held][: 1 + self._lag]
        metrics = {"entropy": 1.0, "grad_norm": float(self._weights[0]), "loss": float(self._weights[1])}
        return Message({"metrics": metrics | {"logprob_diff_max": 0.0, "logprob_diff_ess": 1.0}})

    @rank_command
    def drop_batch(self, *, role: str) -> None:
        self._added = b""

    @rank_command
    def save(self, *, path: str, state: dict[str, Any], **_: Any) -> Message:
        if self._rank:
            return Message({})
        directory = checkpoint.staging(Path(path)) / "state"
        directory.mkdir()
        (directory / "weights").write_bytes(b"".join(self._held))
        num_bytes, digest = checkpoint.finish(Path(path), checkpoint.TrainState(**state))
        return Message({"num_bytes": num_bytes, "manifest_digest": digest})

    @rank_command
    def export(self, *, path: str, files: Mapping[str, str]) -> Message:
        if self._rank == 0:
            (checkpoint.staging(Path(path)) / "weights").write_bytes(self._weights)
            checkpoint.finish_export(Path(path))
        return Message({"num_bytes": 32})

    @rank_command
    def release_memory(self, **_: Any) -> Message:
        return Message({}, [DeviceMemory().SerializeToString()])

    @rank_command
    def acquire_memory(self, **_: Any) -> Message:
        return Message({}, [DeviceMemory().SerializeToString()])

    @rank_command
    def join(self, *, group: str) -> Message:
        self._killed.clear()
        self._group = WeightGroup.FromString(bytes.fromhex(group))
        if self._store:
            self._set("trainer", b"here")
            self._wait("joined", "not all members joined")
        return Message({"plan_digest": "plan"})

    @rank_command
    def send(self, *, version: int, **_: Any) -> Message:
        if self._store:
            self._set(f"weights {version}", self._weights)
            self._wait(f"received {version}", "not all members received the weights")
        return Message({"digest": digest_of(self._weights), "num_bytes": 32, "duration_s": 0.0, "cost": {}})

    def _set(self, name: str, value: bytes) -> None:
        assert self._store
        self._store.tcp_store.set(f"{name_of(self._group)} {name}", value)

    def _wait(self, name: str, why: str) -> None:
        """Waits for every replica's `name`, until the epoch is killed."""
        assert self._store
        first = self._group.world_size - self._num_workers
        keys = [f"{name_of(self._group)} {name} {rank}" for rank in range(first, self._group.world_size)]
        deadline = time.monotonic() + self._group.timeout_s
        while time.monotonic() < deadline:
            if self._store.tcp_store.check(keys):
                return
            if self._killed.wait(0.005):
                raise Aborted("the epoch was given up")
        absent = [key.rpartition(" ")[2] for key in keys if not self._store.tcp_store.check([key])]
        raise Aborted(why, reason=Reason.EPOCH_ABORTED, absent=",".join(absent))

    @property
    def _num_workers(self) -> int:
        return self._group.world_size - (self._group.num_trainer_ranks or 1)

    @rank_command
    def close(self) -> None:
        self._held = [MODEL_WEIGHTS]

    def kill_epoch(self) -> None:
        self._killed.set()

    def saved(self) -> dict[str, Any]:
        raise AssertionError("nothing is saved in the background")


def fork_second_rank() -> int:
    """Forks rank 1, before anything uses asyncio or gRPC; returns the pipe through which it gets rank 0's address."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(reading)
        return writing
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        address = RanksAddress.unpack(pipe.read())
    os._exit(0 if follow(1, address, ToyRank(1, None)) else 1)


async def serve(options: ServeOptions, writing: int) -> int:
    """Runs rank 0."""
    server = Server()
    ranks = Ranks(_NUM_RANKS, "127.0.0.1", server.fail)
    os.write(writing, ranks.address.pack().encode())
    os.close(writing)
    store = ServedStore("127.0.0.1")
    rank = ToyRank(0, store)
    threading.Thread(target=follow, args=(0, ranks.address, rank), daemon=True).start()
    await ranks.wait_for_all()
    servicer = TrainerServicer(ranks, rank, store)  # type: ignore[arg-type]
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server.grpc)
    await server.start(options.listen, [NAME])
    code = await server.serve(grace_s=0.5)
    if code == 0:
        await ranks.end()
    os._exit(code)
