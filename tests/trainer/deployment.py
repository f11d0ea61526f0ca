"""Starts a trainer service and makes the calls of its one caller."""

import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp, WeightGroup

from services.common import batches
from services.common.batches import BlockCutter, batch_sha256, blocks_of, content_sha256
from services.common.config.trainer import TrainerConfig
from services.common.errors import LockstepError
from services.common.rpc.client import Client
from services.common.rpc.transfer import from_messages, to_messages
from tests.support import PATIENCE_S, free_port, make_batch, running
from tests.trainer.fsdp_harness import config

# The limit is far above what any of these calls takes here, so that one that hangs fails its test and not the suite.
TIMEOUT_S = PATIENCE_S
_CHANGE_NOTHING = (TrainerService.GetInfo, TrainerService.JoinWeightGroup, TrainerService.SendWeights)
_numbers = itertools.count(1)


def messages(message: type, header: Any, frames: Sequence[bytes]) -> AsyncIterator[Any]:
    """Returns an iterator over messages of a header, unless it is None, then frames, then their SHA-256."""
    return to_messages(message, frames, header)


def cut(header: pb.TrainHeader, batch: pa.Table) -> Sequence[pa.Table]:
    """Returns the blocks of `batch` that `header` asks for."""
    if not header.tokens_per_block:
        return [batch]
    return blocks_of(batch, BlockCutter(header.tokens_per_block, header.groups_per_minibatch))


def block_messages(
    header: pb.TrainHeader, batch: pa.Table, blocks: Sequence[pa.Table] | None = None
) -> list[pb.TrainRequest]:
    """Returns the messages of a Train call, each frame of a sample; `blocks` are cut as the header says."""
    blocks = blocks or cut(header, batch)
    requests = [pb.TrainRequest(header=header)]
    for block in blocks:
        requests += [pb.TrainRequest(frame=frame) for frame in batches.encode(block, frame_bytes=1)]
        requests.append(pb.TrainRequest(block=pb.TrainBlock(sha256=content_sha256(block))))
    commit = pb.TrainCommit(
        sha256=batch_sha256(header, map(content_sha256, blocks)),
        num_samples=batch.num_rows,
        num_tokens=sum(map(_num_trained, batch.select(["tokens", "loss_mask"]).to_pylist())),
    )
    return [*requests, pb.TrainRequest(commit=commit)]


def _num_trained(row: dict[str, list[Any] | None]) -> int:
    return len(row["tokens"] or ()) if row["loss_mask"] is None else sum(row["loss_mask"])


async def as_stream(messages: Sequence[pb.TrainRequest]) -> AsyncIterator[pb.TrainRequest]:
    for message in messages:
        yield message


class Deployment:
    """Calls a trainer service; keeps the stamp that was published last, and the store's address in `opened`."""

    def __init__(self, address: str, models: Path, pid: int):
        self.client = Client(address, trainer_pb2_grpc.TrainerServiceStub)
        self.address, self.models, self.pid = address, models, pid
        self.stamp = PolicyStamp()
        self.opened = pb.OpenRunResponse()
        self.epoch = 0
        self.run_id = ""
        self._is_unchanged = False

    async def call(self, method: Callable[..., Any], request: Any) -> Any:
        changes_nothing = False
        try:
            answer = await self.client.call(method, request, timeout_s=TIMEOUT_S)
            changes_nothing = method in _CHANGE_NOTHING
            return answer
        except LockstepError:
            changes_nothing = method is TrainerService.Train
            raise
        finally:
            self._is_unchanged &= changes_nothing

    async def open_published(self) -> None:
        """Opens a new run and publishes its weights, unless the last one is still as it was opened here.

        A batch that is refused must leave nothing behind, so another test may go on with its run.
        """
        if not self._is_unchanged:
            await self.open()
            await self.publish()
            self._is_unchanged = True

    async def open(self, kind: str = "untied", checkpoint: str = "", **changes: Any) -> pb.OpenRunResponse:
        """Opens a new run, on a new copy of the model, with a reference if the loss needs one."""
        settings, self.run_id = config(changes), f"run{next(_numbers)}"
        self.opened = await self.open_role(pb.ROLE_POLICY, settings, kind, checkpoint)
        if settings.loss.kl_coef:
            await self.open_role(pb.ROLE_REFERENCE, settings, kind)
        return self.opened

    async def open_role(
        self, role: int, settings: TrainerConfig, kind: str = "untied", checkpoint: str = ""
    ) -> pb.OpenRunResponse:
        request = pb.OpenRunRequest(
            run_id=self.run_id,
            config_json=settings.model_dump_json(),
            model_path=str(self.models / kind),
            checkpoint_path=checkpoint,
            bucket_bytes=1 << 16,
            role=role,
        )
        return await self.call(TrainerService.OpenRun, request)

    async def join(self, *, epoch: int | None = None, world_size: int | None = None, timeout_s: float = 60.0) -> None:
        self.epoch = self.epoch + 1 if epoch is None else epoch
        group = WeightGroup(
            run_id="r",
            epoch=self.epoch,
            store_host=self.opened.store_host,
            store_port=self.opened.store_port,
            store_secret=self.opened.store_secret,
            world_size=world_size or self.opened.plan.num_senders,
            backend=self.opened.weight_backend,
            timeout_s=timeout_s,
        )
        await self.call(TrainerService.JoinWeightGroup, pb.JoinWeightGroupRequest(group=group))

    async def publish(self) -> PolicyStamp:
        """Publishes to a group that has no other member; returns the stamp."""
        await self.join()
        request = pb.SendWeightsRequest(epoch=self.epoch, version=(await self.current_stamp()).version)
        self.stamp = (await self.call(TrainerService.SendWeights, request)).stamp
        return self.stamp

    async def current_stamp(self) -> PolicyStamp:
        return (await self.call(TrainerService.GetInfo, pb.GetInfoRequest())).stamp

    async def train(
        self, batch: pa.Table, *, stamp: PolicyStamp | None = None, batch_id: str = "", **header: Any
    ) -> pb.TrainResponse:
        fields = {"expected_stamp": stamp or self.stamp, "batch_id": batch_id or f"batch{next(_numbers)}"}
        head = pb.TrainHeader(**{**fields, "temperature": 1.0, **header})
        return await self.call(TrainerService.Train, as_stream(block_messages(head, batch)))

    async def forward(self, batch: pa.Table, role: int = pb.ROLE_POLICY, top_k: int = 0) -> pa.Table:
        header = pb.ForwardHeader(role=role, temperature=1.0, top_k=top_k)
        requests = messages(pb.ForwardRequest, header, list(batches.encode(batch)))
        answers = self.client.stream(TrainerService.Forward, requests, timeout_s=TIMEOUT_S)
        return batches.decode((await from_messages(answers, has_header=False))[1])

    def batch(self, stamp: PolicyStamp | None = None, *, seed: int = 0) -> pa.Table:
        return make_batch(4, 3, stamp or self.stamp, seed=seed)


@contextlib.asynccontextmanager
async def deployed(module: str, files: Path, start: Callable[..., Any] = running) -> AsyncIterator[Deployment]:
    """Starts `module` with two ranks and ends it with the block."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", module, "--nproc-per-node", "2", "--listen", address]
    with start(command, files / f"{module}.log") as process:
        deployment = Deployment(address, files / "models", process.pid)
        await deployment.client.call(TrainerService.GetInfo, pb.GetInfoRequest(), timeout_s=1200, wait_for_ready=True)
        yield deployment
        await deployment.client.close()
