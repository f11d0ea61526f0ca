"""TrainerService: holds the on-policy contract. Nothing is computed before every stamp has been compared."""

import asyncio
import functools
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import torch
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.types.v1 import types_pb2

from services.common import batch as batches
from services.common.config.load import parse_json
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.model_card import read_model_card
from services.common.rpc import service_info
from services.common.stamps import require_stamp
from services.trainer import checkpoint
from services.trainer.backend import Role
from services.trainer.checkpoint import TrainState
from services.trainer.ranks import Ranks
from services.trainer.shards import check_samples, forward_parts, train_parts, vocab_size_of
from services.trainer.worker import Worker

NAME = "lockstep.trainer.v1.TrainerService"

Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])

_ROLES = {pb.ROLE_POLICY: Role.POLICY, pb.ROLE_REFERENCE: Role.REFERENCE}


def _to_the_end(method: Method) -> Method:
    """Goes on when the caller gives up: so do the ranks, and what they did must be recorded before the next call."""

    @functools.wraps(method)
    async def call(*args: Any) -> Any:
        return await asyncio.shield(method(*args))

    return call


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Rank 0's face, of which `worker` is a part; weight groups meet at `store_host` and `store_port`."""

    def __init__(self, ranks: Ranks, worker: Worker, store_host: str, store_port: int):
        self._ranks, self._kill_epoch, self._saved = ranks, worker.kill_epoch, worker.saved
        self._store_address = (store_host, store_port)
        self._run = ("", "")  # run id, digest of what OpenRun asked for
        self._config: TrainerConfig | None = None
        self._opened: pb.OpenRunResponse | None = None
        self._data_ranks: dict[str, list[int]] = {}  # role -> of each rank, which samples it gets
        self._state = TrainState(0, "", {})
        self._digest = ""  # of the published weights; empty since they last changed
        self._epoch = -1
        self._saving = asyncio.Lock()  # held until a checkpoint is whole, which may outlast _changing; taken first
        self._changing = asyncio.Lock()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        state = "open" if self._config else "idle"
        info = service_info("trainer", state, run=self._run, libraries=("torch", "transformers"))
        return pb.GetInfoResponse(info=info, stamp=self._held(), num_ranks=self._ranks.num_ranks)

    @_to_the_end
    async def OpenRun(self, request: pb.OpenRunRequest, context: Any) -> pb.OpenRunResponse:
        config = parse_json(TrainerConfig, request.config_json)
        asked = (request.run_id, hashlib.sha256(f"{request.config_json}{request.model_path}".encode()).hexdigest())
        async with self._saving, self._changing:
            if self._opened is None or self._run != asked:
                await self._open(config, request)
                self._run = asked
        answer = pb.OpenRunResponse()
        answer.CopyFrom(self._opened)
        answer.version, answer.last_batch_id = self._state.version, self._state.last_batch_id
        return answer

    @_to_the_end
    async def CloseRun(self, request: pb.CloseRunRequest, context: Any) -> pb.CloseRunResponse:
        async with self._saving, self._changing:
            if request.run_id != self._run[0]:
                return pb.CloseRunResponse()  # a late close of a run that another has replaced
            self._opened = self._config = None
            self._run = ("", "")
            await self._ranks.call("close")
        return pb.CloseRunResponse()

    async def Forward(
        self, requests: AsyncIterator[pb.ForwardRequest], context: Any
    ) -> AsyncIterator[pb.ForwardResponse]:
        header, samples = await receive(requests)
        config = self._open_config()
        if header.role == pb.ROLE_REFERENCE and not config.loss.kl_coef:
            raise InvalidInput("role: no reference model is held, because trainer.loss.kl_coef is 0", field="role")
        if header.role not in _ROLES:
            raise InvalidInput("role: must be policy or reference", field="role")
        _check_temperature(header.temperature)
        check_samples(samples, vocab_size=self._vocab_size())
        role = _ROLES[header.role]
        data_ranks = self._data_ranks[role]
        parts, order = forward_parts(samples, config, max(data_ranks) + 1, role)
        answers = await self._ranks.call(
            "forward", [parts[rank] for rank in data_ranks], role=role, temperature=header.temperature
        )
        # Ranks that share samples give the same answer.
        tables = [batches.decode(answers[data_ranks.index(rank)].frames) for rank in range(len(parts))]
        table = pa.concat_tables(tables).take(pa.array(order))
        for frame in batches.encode(table):
            yield pb.ForwardResponse(frame=frame)

    async def Train(self, requests: AsyncIterator[pb.TrainRequest], context: Any) -> pb.TrainResponse:
        begin = time.perf_counter()
        header, samples = await receive(requests)
        return await self._train(header, samples, begin)

    @_to_the_end
    async def _train(self, header: pb.TrainHeader, samples: pa.Table, begin: float) -> pb.TrainResponse:
        received_s = time.perf_counter() - begin
        config = self._open_config()
        async with self._changing:
            if header.batch_id and header.batch_id == self._state.last_batch_id:
                return self._replay(header)
            self._check_contract(header, samples)
            data_ranks = self._data_ranks[Role.POLICY]
            parts = train_parts(samples, config, max(data_ranks) + 1)
            answers = await self._ranks.call(
                "train",
                [parts[rank] for rank in data_ranks],
                temperature=header.temperature,
                version=self._state.version,
            )
            metrics = answers[0].body["metrics"] | {"receive_s": received_s, "train_s": time.perf_counter() - begin}
            self._state = TrainState(self._state.version + 1, header.batch_id, metrics)
            self._digest = ""
        return pb.TrainResponse(version=self._state.version, metrics=metrics)

    async def JoinWeightGroup(self, request: pb.JoinWeightGroupRequest, context: Any) -> pb.JoinWeightGroupResponse:
        self._open_config()
        if request.group.epoch <= self._epoch:
            raise PreconditionFailed(
                f"epoch {request.group.epoch} is not above {self._epoch}, which this trainer has seen",
                reason=Reason.OLD_EPOCH,
            )
        self._epoch = request.group.epoch
        answers = await self._killing_epoch_on_cancel("join", group=request.group.SerializeToString().hex())
        return pb.JoinWeightGroupResponse(plan_digest=answers[0].body["plan_digest"])

    async def SendWeights(self, request: pb.SendWeightsRequest, context: Any) -> pb.SendWeightsResponse:
        self._open_config()
        async with self._changing:
            if request.epoch != self._epoch:
                raise PreconditionFailed(f"epoch {request.epoch} was not joined", reason=Reason.NOT_JOINED)
            if request.version != self._state.version:
                raise PreconditionFailed(
                    f"asked to send version {request.version}, held is {self._state.version}",
                    reason=Reason.STALE_STAMP,
                )
            skips_base = False
            if self._opened.plan.adapter_config_json:
                agreed = await self._killing_epoch_on_cancel("agree")
                skips_base = agreed[0].body["skips_base"]
            answers = await self._killing_epoch_on_cancel("send", version=request.version, skips_base=skips_base)
            sent = answers[0].body
            self._digest = sent["digest"]
        return pb.SendWeightsResponse(stamp=self._held(), num_bytes=sent["num_bytes"], duration_s=sent["duration_s"])

    @_to_the_end
    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> pb.SaveCheckpointResponse:
        self._open_config()
        async with self._saving:
            async with self._changing:
                if request.HasField("version") and request.version != self._state.version:
                    raise PreconditionFailed(
                        f"asked to save version {request.version}, held is {self._state.version}",
                        reason=Reason.STALE_STAMP,
                    )
                checkpoint.begin(Path(request.path))
                answers = await self._ranks.call("save", path=request.path, state=vars(self._state))
            # An empty answer: the ranks have their copies and write them, and Train may change the weights.
            answer = answers[0].body or await asyncio.to_thread(self._saved)
        return pb.SaveCheckpointResponse(**answer)

    @_to_the_end
    async def LoadCheckpoint(self, request: pb.LoadCheckpointRequest, context: Any) -> pb.LoadCheckpointResponse:
        self._open_config()
        async with self._saving, self._changing:
            state = await asyncio.to_thread(checkpoint.verify, Path(request.path))
            await self._ranks.call("load", path=request.path)
            self._state, self._digest = state, ""
        return pb.LoadCheckpointResponse(version=state.version)

    @_to_the_end
    async def ExportHuggingFace(
        self, request: pb.ExportHuggingFaceRequest, context: Any
    ) -> pb.ExportHuggingFaceResponse:
        self._open_config()
        async with self._changing:
            checkpoint.begin(Path(request.path))
            answers = await self._ranks.call("export", path=request.path)
        return pb.ExportHuggingFaceResponse(**answers[0].body)

    async def _open(self, config: TrainerConfig, request: pb.OpenRunRequest) -> None:
        card = read_model_card(request.model_path)
        state = TrainState(0, "", {})
        if request.checkpoint_path:
            state = await asyncio.to_thread(checkpoint.verify, Path(request.checkpoint_path))
        self._opened = self._config = None
        answers = await self._ranks.call(
            "open",
            config_json=request.config_json,
            model_path=request.model_path,
            checkpoint_path=request.checkpoint_path,
            seed=request.seed,
            bucket_bytes=request.bucket_bytes,
        )
        self._config, self._state, self._digest, self._epoch = config, state, "", -1
        roles = answers[0].body["data_ranks"]
        self._data_ranks = {role: [answer.body["data_ranks"][role] for answer in answers] for role in roles}
        self._opened = pb.OpenRunResponse(
            model_card=card,
            plan=types_pb2.WeightPlan.FromString(answers[0].frames[0]),
            store_host=self._store_address[0],
            store_port=self._store_address[1],
            weight_backend="nccl" if torch.cuda.is_available() else "gloo",
            num_ranks=self._ranks.num_ranks,
        )

    def _check_contract(self, header: pb.TrainHeader, samples: pa.Table) -> None:
        """Design, section 7: the batch and every sample of it must carry exactly the held stamp."""
        if not header.batch_id:
            raise InvalidInput("batch_id: required", field="batch_id")
        _check_temperature(header.temperature)
        require_stamp(header.expected_stamp, self._held(), who="the trainer")
        stamps = samples.group_by(["policy_version", "policy_digest"], use_threads=False).aggregate([])
        for row in stamps.to_pylist():
            sampled_from = types_pb2.PolicyStamp(version=row["policy_version"], digest=row["policy_digest"])
            require_stamp(sampled_from, self._held(), who="a sample was drawn from other weights: the trainer")
        check_samples(samples, vocab_size=self._vocab_size())

    def _replay(self, header: pb.TrainHeader) -> pb.TrainResponse:
        if header.expected_stamp.version + 1 != self._state.version:
            raise PreconditionFailed(
                f"batch {header.batch_id} was applied to version {self._state.version - 1}, "
                f"not to {header.expected_stamp.version}",
                reason=Reason.REPLAYED_BATCH,
            )
        return pb.TrainResponse(version=self._state.version, metrics=self._state.last_metrics, replayed=True)

    async def _killing_epoch_on_cancel(self, method: str, **arguments: Any) -> Any:
        try:
            return await self._ranks.call(method, **arguments)
        except asyncio.CancelledError:
            self._kill_epoch()  # the caller gave up on a member; nobody else should wait for it
            raise

    def _held(self) -> types_pb2.PolicyStamp:
        return types_pb2.PolicyStamp(version=self._state.version, digest=self._digest)

    def _open_config(self) -> TrainerConfig:
        if self._config is None:
            raise PreconditionFailed("no run is open on this trainer; call OpenRun", reason=Reason.RUN_NOT_OPEN)
        return self._config

    def _vocab_size(self) -> int:
        return vocab_size_of(self._opened.model_card.files["config.json"])


async def receive(requests: AsyncIterator[Any]) -> tuple[Any, pa.Table]:
    header, frames = None, []
    async for request in requests:
        part = request.WhichOneof("part")
        if (part == "header") != (header is None):
            raise InvalidInput("header: must be the first message, once, before the frames", field="header")
        if part == "header":
            header = request.header
        else:
            frames.append(request.frame)
    if header is None:
        raise InvalidInput("header: must be the first message", field="header")
    return header, batches.decode(frames, schema=batches.SAMPLE_SCHEMA)


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise InvalidInput(f"temperature: must be above 0 and finite, not {temperature:g}", field="temperature")
