"""Calls the trainers: the policy's, and those of reference, critic and teacher."""

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

import grpc
import pyarrow as pa
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import DeviceMemory, ModelCard, PolicyStamp, WeightGroup

from services.common import batches
from services.common.config.load import AnyConfig, role_section
from services.common.config.run import Config
from services.common.config.streaming import block_growth, groups_per_minibatch, tokens_per_block
from services.common.errors import Aborted, InvalidInput, LockstepError, PreconditionFailed, Reason, counted
from services.common.rpc.address import parse_address
from services.common.rpc.client import MAX_RETRY_S, Answer, Client, Method, Renewal, Request, repeated
from services.common.rpc.tls import LOCAL, Transport
from services.common.rpc.transfer import from_messages, to_messages
from services.coordinator.clients.gpus import OwnGpus, Side
from services.coordinator.runs.clock import Busy
from services.coordinator.text.cards import served_files

log = logging.getLogger(__name__)

# A function that makes the call with these requests.
Call = Callable[[AsyncIterator[pb.TrainRequest]], Awaitable[pb.TrainResponse]]


def _updated(batch_id: str, answer: pb.TrainResponse) -> tuple[int, dict[str, float]]:
    """Returns the new version and metrics. Warns if updates were not applied because their gradient is not finite."""
    for name in ("skipped", "critic_skipped"):
        if num_skipped := answer.metrics.get(name, 0):
            log.warning(
                "batch %s: skipped %g update%s whose gradient is not finite (train/%s); the weights stay as they were",
                *(batch_id, num_skipped, "" if num_skipped == 1 else "s", name),
            )
    return answer.version, dict(answer.metrics)


def _cut(header: pb.TrainHeader, batch: pa.Table) -> Sequence[pa.Table]:
    if not header.tokens_per_block:
        return [batch]
    return batches.blocks_of(
        batch, batches.BlockCutter(header.tokens_per_block, header.groups_per_minibatch, header.block_growth)
    )


def _block(block: pa.Table, sha256: bytes) -> Iterator[pb.TrainRequest]:
    for frame in batches.encode(block):
        yield pb.TrainRequest(frame=frame)
    yield pb.TrainRequest(block=pb.TrainBlock(sha256=sha256))


def _commit(header: pb.TrainHeader, batch: pa.Table, hashes: Iterable[bytes]) -> pb.TrainRequest:
    num_tokens = int(batches.trained_tokens(batch).sum())
    sha256 = batches.batch_sha256(header, hashes)
    return pb.TrainRequest(commit=pb.TrainCommit(sha256=sha256, num_samples=batch.num_rows, num_tokens=num_tokens))


async def whole_batch(header: pb.TrainHeader, batch: pa.Table) -> AsyncGenerator[pb.TrainRequest, None]:
    """Yields the messages that train on `batch`: header, all blocks at once and the commit."""
    yield pb.TrainRequest(header=header)
    hashes: list[bytes] = []
    for block in _cut(header, batch):
        hashes.append(await asyncio.to_thread(batches.content_sha256, block))
        for message in _block(block, hashes[-1]):
            yield message
    yield _commit(header, batch, hashes)


class BlockStream:
    """Makes one Train call: `run` starts it, `send` gives it blocks, and `commit` ends it."""

    def __init__(self, header: pb.TrainHeader, call: Call):
        self._header, self._call = header, call
        # Made before they are sent: gRPC takes an error in the iterator of requests for a canceled call.
        self._parts: asyncio.Queue[Sequence[pb.TrainRequest]] = asyncio.Queue()

    async def run(self) -> tuple[int, dict[str, float]]:
        """Makes the call, which waits for blocks. Returns the new version and metrics, after the commit.

        Raises:
            LockstepError: The call failed. Nothing was applied, unless the commit was sent before.
        """
        return _updated(self._header.batch_id, await self._call(self._requests()))

    def send(self, block: pa.Table) -> None:
        self._parts.put_nowait([*_block(block, batches.content_sha256(block))])

    def commit(self, batch: pa.Table) -> None:
        """Sends the commit of `batch`, which must have the values of the blocks that were sent."""
        # Hashes of the recorded batch, and not those of the blocks that were sent: so the trainer notices a difference.
        self._parts.put_nowait([_commit(self._header, batch, map(batches.content_sha256, _cut(self._header, batch)))])
        self._parts.put_nowait([])  # ends the stream of requests

    async def _requests(self) -> AsyncGenerator[pb.TrainRequest, None]:
        yield pb.TrainRequest(header=self._header)
        while part := await self._parts.get():
            for message in part:
                yield message


class TrainerClient(Client):
    """Calls a trainer on which a run was opened. If no run is open there, the trainer has lost it."""

    def _failure(self, error: grpc.aio.AioRpcError, method: str) -> LockstepError:
        failure = super()._failure(error, method)
        if failure.reason is not Reason.RUN_NOT_OPEN:
            return failure
        message = (
            f"{method}: the trainer at {self.address} has no run open: it was restarted or has lost the run; the same "
            "command resumes the run"
        )
        return PreconditionFailed(message, reason=failure.reason, **failure.metadata)


# Config section -> (role, columns that Forward returns and their names in the batch, columns that it never reads).
# Only the policy replays routed experts. A critic has no distribution that sampling masks could cut.
_ROLES: Mapping[str, tuple[pb.Role, Mapping[str, str], Sequence[str]]] = {
    "trainer": (pb.ROLE_POLICY, {"logprobs": "old_logprobs"}, ()),
    "reference": (pb.ROLE_REFERENCE, {"logprobs": "ref_logprobs"}, ("routed_experts",)),
    "critic": (pb.ROLE_CRITIC, {"values": "values"}, ("routed_experts", "sampling_mask", "teacher_top_k")),
    "teacher": (pb.ROLE_TEACHER, {"logprobs": "teacher_logprobs", "top_k": "teacher_top_k"}, ("routed_experts",)),
}


def role_of(name: str) -> pb.Role:
    return _ROLES[name][0]


class Model:
    """Calls one model of a run, named like its config section. It may share its ranks with other models."""

    def __init__(
        self, name: str, address: str, config: AnyConfig, transport: Transport = LOCAL, gpus: OwnGpus | None = None
    ):
        """Creates a client. Calls that compute or save hold `gpus` for the trainer."""
        self.name = name
        self._gpus = gpus or OwnGpus()
        self._client = TrainerClient(address, trainer_pb2_grpc.TrainerServiceStub, transport)
        self._config, self._timeouts, self._renewal = config, config.timeouts, Renewal()
        self._role, self._columns, self._unread = _ROLES[name]
        self._top_k = 0, 0
        self.opened = pb.OpenRunResponse()
        self.busy = Busy()

    async def open(self, run_id: str, checkpoint: str = "") -> int:
        """Loads the model or, if given, the checkpoint at path `checkpoint`. Returns the version that was loaded.

        Raises:
            InvalidInput: The trainer has another number of ranks than the config. The same step would then have other
                results, and the record of the run would not say why.
        """
        section = role_section(self._config, self.name)
        request = pb.OpenRunRequest(
            run_id=run_id,
            config_json=self._config.models[self.name].model_dump_json(),
            model_path=(section and section.model) or self._config.model,
            checkpoint_path=checkpoint,
            seed=self._config.seed,
            bucket_bytes=self._config.bucket_bytes,
            role=self._role,
        )
        await self._require_num_ranks()
        # Before OpenRun, which begins the lease and may take longer than it.
        self._renewal.begin(self._client, TrainerService.GetInfo, pb.GetInfoRequest(), self._timeouts.lease_s)
        self.opened = await self._client.call_starting(TrainerService.OpenRun, request, timeout_s=self._timeouts.open_s)
        # A trainer that listens on all interfaces does not know which address reaches it; the one we called does.
        self.opened.store_host = self.opened.store_host or parse_address(self._client.address, field=self.name)[0]
        return self.opened.version

    async def _require_num_ranks(self) -> None:
        timeout_s = self._timeouts.open_s
        info = await self._client.call_starting(TrainerService.GetInfo, pb.GetInfoRequest(), timeout_s=timeout_s)
        num_ranks = self._config.models[self.name].num_ranks
        if info.num_ranks != num_ranks:
            role = role_section(self._config, self.name)
            key = f"{self.name if role and role.num_ranks else 'trainer'}.num_ranks"
            raise InvalidInput(
                f"the trainer at {self._client.address} has {counted(info.num_ranks, 'rank')}, but {key} is "
                f"{num_ranks}: start it with that number (--nproc-per-node), or set {key} to {info.num_ranks}",
                field=key,
            )

    def return_top_k(self, k: int, vocab_size: int) -> None:
        """Makes every forward also return the k most probable of the first `vocab_size` tokens, if k is above 0."""
        self._top_k = k, vocab_size

    async def forward(self, batch: pa.Table) -> dict[str, pa.ChunkedArray]:
        """Returns the model's columns of `batch`: the log-probability, or the critic's value, of every completion
        token, and a teacher's most probable tokens if the loss reads them."""
        header, batch = pb.ForwardHeader(role=self._role, temperature=self._temperature), self._needed(batch)
        header.top_k, header.vocab_size = self._top_k

        async def forward(timeout_s: float) -> list[bytes]:
            requests = to_messages(pb.ForwardRequest, batches.encode(batch), header)
            answers = self._client.stream(TrainerService.Forward, requests, timeout_s=timeout_s)
            return (await from_messages(answers, has_header=False))[1]

        async with self._gpus.held_by(Side.TRAINER):
            answer = batches.decode(await repeated(forward, timeout_s=self._timeouts.train_s))
        return {ours: answer[name] for name, ours in self._columns.items() if name in answer.column_names}

    async def train(
        self,
        batch: pa.Table,
        batch_id: str,
        stamp: PolicyStamp,
        critic_version: int = 0,
        drawn: PolicyStamp | None = None,
    ) -> tuple[int, dict[str, float]]:
        """Makes one update of `stamp` on `batch`, which must be sampled from `drawn`, or else from `stamp`.

        Returns the new version and metrics. Safe to repeat: the trainer applies each batch id only once, and
        answers it again with the same metrics.
        """
        header, batch = self._header(batch_id, stamp, critic_version, drawn), self._needed(batch)
        if header.tokens_per_block and (num_minibatches := self._config.trainer.num_minibatches) > 1:
            header.groups_per_minibatch = len(batches.begins_of_groups(batch)) // num_minibatches
        async with self._gpus.held_by(Side.TRAINER):
            with self.busy.working():
                return _updated(batch_id, await self._train(header, batch))

    async def _train(self, header: pb.TrainHeader, batch: pa.Table) -> pb.TrainResponse:
        def call() -> Awaitable[pb.TrainResponse]:
            requests = functools.partial(whole_batch, header, batch)
            timeout_s = self._timeouts.train_s
            return self._client.call(TrainerService.Train, requests, timeout_s=timeout_s, max_retry_s=MAX_RETRY_S)

        try:
            return await call()
        except Aborted as error:
            if error.reason is not Reason.STREAM_ENDED:
                raise
            return await call()  # the other call of this run that needed the ranks, such as a save, has ended

    async def save(self, path: str, version: int) -> str:
        """Writes a checkpoint of `version`, which the ranks must hold. Returns the SHA-256 of its manifest."""
        request = pb.SaveCheckpointRequest(path=path, version=version, role=self._role)
        async with self._gpus.held_by(Side.TRAINER):
            timeout_s = self._timeouts.checkpoint_s
            return (await self._repeatable(TrainerService.SaveCheckpoint, request, timeout_s)).manifest_digest

    async def release_memory(
        self, *parts: pb.ModelPart, roles: Sequence[pb.Role] = (), least_free_bytes: int = 0
    ) -> Sequence[DeviceMemory]:
        """Releases parts of models and returns the memory of each rank; no role is every role there.

        They move to host memory, except from a device that already has at least `least_free_bytes` free; 0 moves all.
        """
        request = pb.ReleaseMemoryRequest(parts=parts, roles=roles, least_free_bytes=least_free_bytes)
        return (await self._repeatable(TrainerService.ReleaseMemory, request, self._timeouts.memory_s)).ranks

    async def acquire_memory(self, *parts: pb.ModelPart, roles: Sequence[pb.Role] = ()) -> Sequence[DeviceMemory]:
        """Moves parts of models back to the devices and returns the memory of each rank; no role is every role there.

        Raises:
            Overloaded: OUT_OF_MEMORY, a device has too little; nothing was taken on that device.
        """
        request = pb.AcquireMemoryRequest(parts=parts, roles=roles)
        return (await self._repeatable(TrainerService.AcquireMemory, request, self._timeouts.memory_s)).ranks

    async def _repeatable(self, method: Method[Request, Answer], request: Request, timeout_s: float) -> Answer:
        # Saving, exporting and moving memory twice does no harm, so a call that is lost is made again.
        return await self._client.call(method, request, timeout_s=timeout_s, max_retry_s=MAX_RETRY_S)

    async def close(self) -> None:
        await self._renewal.end()
        await self._client.close()

    def _header(
        self, batch_id: str, stamp: PolicyStamp, critic_version: int = 0, drawn: PolicyStamp | None = None
    ) -> pb.TrainHeader:
        # Only the policy's batches are cut: a critic is trained on the whole batch, as is a model of SFT.
        config = self._config if self._role == pb.ROLE_POLICY and isinstance(self._config, Config) else None
        return pb.TrainHeader(
            expected_stamp=stamp,
            drawn_stamp=drawn,
            batch_id=batch_id,
            temperature=self._temperature,
            role=self._role,
            critic_version=critic_version,
            tokens_per_block=tokens_per_block(config) if config else 0,
            block_growth=block_growth(config) if config else 0,
        )

    def _needed(self, batch: pa.Table) -> pa.Table:
        """Returns the batch without what this model does not read. That can be most of its bytes."""
        return batches.without(batch, *self._unread)

    @property
    def _temperature(self) -> float:
        return self._config.rollout.sampling.temperature if isinstance(self._config, Config) else 1.0


class Trainer(Model):
    """Calls the policy's trainer, which also publishes and exports weights."""

    def __init__(self, address: str, config: AnyConfig, transport: Transport = LOCAL, gpus: OwnGpus | None = None):
        super().__init__("trainer", address, config, transport, gpus)
        self._served = ModelCard()

    async def open(self, run_id: str, checkpoint: str = "") -> int:
        """Loads the model like Model.open, and reads what an export needs, because a file may be gone at the end.

        Raises:
            InvalidInput: See Model.open; or the tokenizer or chat template cannot be used.
        """
        version = await super().open(run_id, checkpoint)
        self._served = served_files(self.opened.model_card, self._config.data)
        return version

    async def go_back(self, run_id: str, checkpoint: str) -> int:
        """Closes the run and opens it again at `checkpoint`, or at the model it began with. Returns the version."""
        request = pb.CloseRunRequest(run_id=run_id)
        await self._client.call(TrainerService.CloseRun, request, timeout_s=self._timeouts.open_s)
        return await self.open(run_id, checkpoint)

    def stream(self, batch_id: str, stamp: PolicyStamp) -> BlockStream:
        """Begins to send the blocks of a batch that is sampled from `stamp`. The result is that of `train`."""
        # Made once, unlike `train`: the blocks are gone, so a stream that is lost is sent again as a whole batch.
        # While blocks are sent, other groups are generated.
        timeout_s = self._timeouts.generate_s + self._timeouts.train_s

        async def call(requests: AsyncIterator[pb.TrainRequest]) -> pb.TrainResponse:
            with self.busy.working():
                return await self._client.call(TrainerService.Train, requests, timeout_s=timeout_s)

        header, config = self._header(batch_id, stamp), self._config
        if isinstance(config, Config) and config.trainer.num_minibatches > 1:
            header.groups_per_minibatch = groups_per_minibatch(config)
        return BlockStream(header, call)

    async def join(self, group: WeightGroup) -> str:
        """Joins the weight group as its first members. Returns the digest of the plan that the trainer built."""
        request = pb.JoinWeightGroupRequest(group=group)
        answer = await self._client.call(TrainerService.JoinWeightGroup, request, timeout_s=self._timeouts.publish_s)
        return answer.plan_digest

    async def send(self, epoch: int, version: int) -> PolicyStamp:
        """Broadcasts the policy's weights and returns their stamp."""
        request = pb.SendWeightsRequest(epoch=epoch, version=version)
        answer = await self._client.call(TrainerService.SendWeights, request, timeout_s=self._timeouts.publish_s)
        return answer.stamp

    async def export(self, path: str) -> None:
        """Writes the policy as a Hugging Face model directory that serves what was trained."""
        request = pb.ExportHuggingFaceRequest(path=path, model_card=self._served)
        async with self._gpus.held_by(Side.TRAINER):
            await self._repeatable(TrainerService.ExportHuggingFace, request, self._timeouts.checkpoint_s)
