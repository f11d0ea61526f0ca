"""Serves TrainerService, and enforces the on-policy contract: compares every stamp before anything is computed."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.types.v1 import types_pb2

from services.common import batches
from services.common.compat.torch import accelerator_libraries
from services.common.config.load import parse_json
from services.common.config.trainer import TrainerConfig, require_made_with
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.families.supported import check_bounds
from services.common.model_card import card_texts, read_model_card
from services.common.rpc.address import is_loopback
from services.common.rpc.fence import Fence
from services.common.rpc.progress import PROGRESS
from services.common.rpc.server import Context, OpenedRun, service_info, shielded
from services.common.rpc.transfer import from_messages, to_messages
from services.common.weights.buckets import highest_cost
from services.common.weights.store import ServedStore
from services.common.weights.trial import take_part, trial_group
from services.trainer import contract
from services.trainer.backend import Part, Role
from services.trainer.checkpoint import manifest as checkpoint
from services.trainer.metrics import TrainerMetrics
from services.trainer.ranks.calls import GRACE_S, Command, Message, Ranks, published_host
from services.trainer.ranks.worker import Worker
from services.trainer.samples import forward_parts
from services.trainer.stream import ArrivingBatches, BatchReader, BatchTraining

NAME = "lockstep.trainer.v1.TrainerService"


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Serves gRPC on rank 0: calls commands on all `ranks`, of which `worker` is rank 0's own."""

    def __init__(self, ranks: Ranks, worker: Worker, store: ServedStore, metrics: TrainerMetrics | None = None):
        self._metrics = metrics or TrainerMetrics()
        self._ranks, self._kill_epoch, self._saved = ranks, worker.kill_epoch, worker.saved
        self._store = store  # where the members of weight groups meet
        self._run_id, self._fence = "", Fence(self._close_abandoned)
        self._roles: dict[Role, contract.OpenRole] = {}
        self._epoch, self._epoch_timeout_s = -1, 0.0
        self._last_save = (pb.SaveCheckpointRequest(), pb.SaveCheckpointResponse())  # of the open run, with its answer
        self._last_export = ("", -1, pb.ExportHuggingFaceResponse())  # its path and version, with its answer
        self._saving = asyncio.Lock()  # held until a checkpoint is complete; acquired before _changing
        self._arriving = ArrivingBatches()
        self._changing = asyncio.Lock()  # held while a call changes weights or roles, or needs them unchanged

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        self._fence.renew_lease()
        state = "open" if self._roles else "idle"
        policy = self._roles.get(Role.POLICY)
        run = OpenedRun(self._run_id, policy.request_sha256 if policy else "")
        info = service_info("trainer", state, run=run, libraries=("torch", "transformers"))
        info.libraries.update(accelerator_libraries())
        stamp = policy.stamp if policy else types_pb2.PolicyStamp()
        return pb.GetInfoResponse(info=info, stamp=stamp, num_ranks=self._ranks.num_ranks)

    @shielded
    async def OpenRun(self, request: pb.OpenRunRequest, context: Context) -> pb.OpenRunResponse:
        role = contract.role_of(request.role)
        config = parse_json(role.config, request.config_json)
        request_sha256 = hashlib.sha256(f"{request.config_json}{request.model_path}".encode()).hexdigest()
        async with self._saving, self._changing:
            opened = self._roles.get(role) if request.run_id == self._run_id else None
            if opened is None or opened.request_sha256 != request_sha256:
                await self._open(role, config, request, request_sha256)
            opened = self._roles[role]
            # Also if nothing was opened: a coordinator that has resumed the run has another token.
            self._fence.take_over(request.run_id)
            await self._arriving.end_all()
        answer = pb.OpenRunResponse()
        answer.CopyFrom(opened.answer)
        answer.version, answer.last_batch_id = opened.state.version, opened.state.last_batch_id
        return answer

    @shielded
    async def CloseRun(self, request: pb.CloseRunRequest, context: Context) -> pb.CloseRunResponse:
        async with self._saving, self._changing:
            if request.run_id != self._run_id or not self._fence.is_open:
                return pb.CloseRunResponse()  # another coordinator has replaced this one since
            await self._arriving.end_all()
            await self._close()
        return pb.CloseRunResponse()

    async def Forward(
        self, request_iterator: AsyncIterator[pb.ForwardRequest], context: Context
    ) -> AsyncIterator[pb.ForwardResponse]:
        header, frames = await from_messages(request_iterator, has_header=True)
        samples = batches.decode(frames, schema=batches.SAMPLE_SCHEMA)
        if header.role == pb.ROLE_UNSPECIFIED:
            raise InvalidInput("role: must be policy, reference, critic or teacher", field="role")
        role = contract.role_of(header.role)
        opened = self._require_open(self._stand_in(role))
        opened.require_here(Part.PARAMETERS)
        contract.check_temperature(header.temperature)
        opened.check_samples(samples)
        top_k = contract.top_k_of(header, role, opened)
        parts, order = forward_parts(samples, opened.config, opened.num_parts, role, pads_rows=opened.pads_rows)
        wanted = {"role": role, "temperature": header.temperature, "top_k": top_k}
        answers = await self._ranks.call(Worker.forward, [parts[rank] for rank in opened.data_ranks], **wanted)
        # Ranks that get the same samples give the same answer.
        outputs = [batches.decode(answers[opened.data_ranks.index(rank)].frames) for rank in range(len(parts))]
        in_order = pa.concat_tables(outputs).take(pa.array(order))
        async for answer in to_messages(pb.ForwardResponse, batches.encode(in_order)):
            yield answer

    @shielded  # a batch whose commit has arrived is applied and recorded, so that a retry does not apply it again
    async def Train(self, request_iterator: AsyncIterator[pb.TrainRequest], context: Context) -> pb.TrainResponse:
        reader = BatchReader(request_iterator)
        header = await reader.header()
        role = contract.role_of(header.role, is_trained=True)
        async with self._changing:
            opened = self._require_open(role)
            training = BatchTraining(self._ranks, header, opened)
            if not (is_repeated := header.batch_id == opened.state.last_batch_id):
                opened.require_here(*Part)
                await self._arriving.begin(training)
        if is_repeated:
            # The samples arrive without the lock, so that other calls are answered meanwhile.
            sha256 = await asyncio.to_thread(batches.content_sha256, await reader.rest())
            async with self._changing:
                return contract.replay(header, self._require_open(role), sha256.hex())
        try:
            async for block in reader:
                async with self._still_arriving(training):
                    await training.add(block)
            begin = time.perf_counter()
            # Hashed while it is applied.
            hashing = asyncio.create_task(asyncio.to_thread(batches.content_sha256, training.samples))
            async with self._still_arriving(training):
                metrics, sha256 = await training.apply(), await hashing
                if role is Role.POLICY:
                    metrics |= {"train_s": training.busy_s, "commit_s": time.perf_counter() - begin}
                opened.trained(header, metrics, sha256.hex())
                self._metrics.trained(role, training.samples)
                self._metrics.version.labels(role).set(opened.state.version)
                return pb.TrainResponse(version=opened.state.version, metrics=metrics, samples_sha256=sha256)
        finally:
            async with self._changing:
                await self._arriving.end(training)

    async def JoinWeightGroup(self, request: pb.JoinWeightGroupRequest, context: Context) -> pb.JoinWeightGroupResponse:
        policy = self._require_open()
        if request.group.epoch <= self._epoch:
            raise PreconditionFailed(
                f"epoch {request.group.epoch} is not above epoch {self._epoch}, which this trainer has joined",
                reason=Reason.OLD_EPOCH,
            )
        store, plan = request.group.store_host, policy.answer.plan
        if plan.num_senders > 1 and self._ranks.num_hosts > 1 and is_loopback(store):
            raise InvalidInput(
                f"store_host: ranks on other hosts also send weights and cannot reach {store}; give the coordinator an "
                "address of the trainer that all of its hosts can reach",
                field="store_host",
            )
        # Before the attempt: an epoch in which a member has failed must not be joined again.
        self._epoch, self._epoch_timeout_s = request.group.epoch, request.group.timeout_s
        answers = await self._killing_epoch_on_cancel(Worker.join, group=request.group.SerializeToString().hex())
        return pb.JoinWeightGroupResponse(plan_digest=answers[0].body["plan_digest"])

    async def SendWeights(self, request: pb.SendWeightsRequest, context: Context) -> pb.SendWeightsResponse:
        async with self._changing:
            policy = self._require_open()
            if request.epoch != self._epoch:
                raise PreconditionFailed(f"epoch {request.epoch} was not joined", reason=Reason.NOT_JOINED)
            contract.require_version(request.version, policy, "version {} was to be sent")
            policy.require_here(Part.PARAMETERS)
            skips_base = False
            if policy.answer.plan.adapter_config_json:
                agreed = await self._killing_epoch_on_cancel(Worker.agree)
                skips_base = agreed[0].body["skips_base"]
            answers = await self._killing_epoch_on_cancel(Worker.send, version=request.version, skips_base=skips_base)
            sent = answers[0].body
            policy.published(sent["digest"])
            self._metrics.sent(sent["num_bytes"], sent["duration_s"])
        return pb.SendWeightsResponse(
            stamp=policy.stamp,
            num_bytes=sent["num_bytes"],
            duration_s=sent["duration_s"],
            cost=highest_cost([answer.body["cost"] for answer in answers if answer.body]),
        )

    @shielded
    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Context) -> pb.SaveCheckpointResponse:
        role = contract.role_of(request.role, is_trained=True)
        async with self._saving, contextlib.AsyncExitStack() as stack:
            stack.enter_context(PROGRESS.stage("save a checkpoint"))
            async with self._changing:
                opened = self._require_open(role)
                if request.path and request == self._last_save[0] and Path(request.path).exists():
                    return self._last_save[1]  # the caller did not get this answer
                if request.HasField("version"):
                    contract.require_version(request.version, opened, "version {} was to be saved")
                opened.require_here(*Part)
                await self._arriving.end_all()  # FSDP does not save while there are gradients
                stack.enter_context(checkpoint.staged(Path(request.path)))
                answers = await self._ranks.call(Worker.save, path=request.path, state=vars(opened.state), role=role)
            # If the answer is empty, the ranks write copies in the background, and Train may change the weights.
            answer = answers[0].body or await asyncio.to_thread(self._saved)
            self._last_save = (request, pb.SaveCheckpointResponse(**answer))
        return self._last_save[1]

    @shielded
    async def ExportHuggingFace(
        self, request: pb.ExportHuggingFaceRequest, context: Context
    ) -> pb.ExportHuggingFaceResponse:
        async with self._changing:
            policy = self._require_open()
            export = request.path, policy.state.version
            if export == self._last_export[:2] and Path(request.path).exists():
                return self._last_export[2]  # the caller did not get this answer
            policy.require_here(Part.PARAMETERS)
            with PROGRESS.stage("export the model"), checkpoint.staged(Path(request.path)):
                answers = await self._ranks.call(Worker.export, path=request.path, files=card_texts(request.model_card))
            self._last_export = (*export, pb.ExportHuggingFaceResponse(**answers[0].body))
        return self._last_export[2]

    @shielded
    async def ReleaseMemory(self, request: pb.ReleaseMemoryRequest, context: Context) -> pb.ReleaseMemoryResponse:
        async with self._changing:
            self._require_any_open()
            await self._arriving.end_all()  # its gradients are dropped with the optimizer's memory
            return pb.ReleaseMemoryResponse(ranks=await contract.release(self._ranks, request, self._roles))

    @shielded
    async def AcquireMemory(self, request: pb.AcquireMemoryRequest, context: Context) -> pb.AcquireMemoryResponse:
        async with self._changing:
            self._require_any_open()
            return pb.AcquireMemoryResponse(ranks=await contract.acquire(self._ranks, request, self._roles))

    async def SendTestBroadcast(
        self, request: pb.SendTestBroadcastRequest, context: Context
    ) -> AsyncIterator[pb.SendTestBroadcastResponse]:
        async with self._saving, self._changing:
            if self._roles:
                raise PreconditionFailed(
                    f"run {self._run_id} is open on this trainer and a test broadcast would disturb it; end it first"
                )
            try:
                group = trial_group(
                    self._store.renew(), num_receivers=request.num_receivers, timeout_s=request.timeout_s
                )
                group.store_host = published_host(group.store_host) or request.host
                yield pb.SendTestBroadcastResponse(group=group)
                yield pb.SendTestBroadcastResponse(outcome=await take_part(group, rank=0))
            finally:
                self._store.renew()  # so that a receiver of the trial cannot join a run's group with its secret

    async def _open(self, role: Role, config: TrainerConfig, request: pb.OpenRunRequest, sha256: str) -> None:
        card = read_model_card(request.model_path)
        check_bounds(request.model_path)
        made_with = await asyncio.to_thread(contract.made_with, config, Path(request.model_path), card)
        state = checkpoint.TrainState(0, "", {})
        if request.checkpoint_path:
            with PROGRESS.stage("verify the checkpoint"):
                state = await asyncio.to_thread(checkpoint.verify, Path(request.checkpoint_path))
            require_made_with(state.made_with, made_with, request.checkpoint_path)
        state = replace(state, made_with=made_with)
        # Only after what may be refused, so that a refused call takes the trainer from nobody.
        self._fence.take_over(request.run_id)
        await self._arriving.end_all()
        if self._roles and (role is Role.POLICY or request.run_id != self._run_id):
            await self._close()
        self._roles.pop(role, None)
        self._metrics.version.remove(role)
        answers = await self._ranks.call(
            Worker.open,
            role=role,
            config_json=request.config_json,
            model_path=request.model_path,
            checkpoint_path=request.checkpoint_path,
            seed=request.seed,
            bucket_bytes=request.bucket_bytes,
        )
        address = self._store.renew() if role is Role.POLICY else self._store.address
        opened = pb.OpenRunResponse(
            model_card=card,
            store_host=published_host(address.host),
            store_port=address.port,
            store_secret=address.secret,
            weight_backend="nccl" if torch.cuda.is_available() else "gloo",
            num_ranks=self._ranks.num_ranks,
        )
        if role is Role.POLICY:
            opened.plan.ParseFromString(answers[0].frames[0])
        self._run_id = request.run_id
        data_ranks = [answer.body["data_rank"] for answer in answers]
        pads_rows = answers[0].body["pads_rows"]
        self._roles[role] = contract.OpenRole(role, sha256, config, opened, data_ranks, state, pads_rows=pads_rows)
        self._metrics.version.labels(role).set(state.version)

    async def _close_abandoned(self) -> None:
        async with self._saving, self._changing:
            if self._fence.lease.has_ended(self._run_id):
                await self._arriving.end_all()
                await self._close()

    async def _close(self) -> None:
        self._run_id, self._roles, self._epoch = "", {}, -1
        self._metrics.version.clear()
        self._last_save = (pb.SaveCheckpointRequest(), pb.SaveCheckpointResponse())
        self._last_export = ("", -1, pb.ExportHuggingFaceResponse())
        self._store.renew()  # the old secret becomes invalid, and no caller gets the new one
        await self._ranks.call(Worker.close)

    @contextlib.asynccontextmanager
    async def _still_arriving(self, training: BatchTraining) -> AsyncGenerator[None]:
        """Holds the weights for a part of `training`, if its run is still open and no other call has ended it."""
        async with self._changing:
            self._require_open(training.role)
            self._arriving.require(training)
            yield

    async def _killing_epoch_on_cancel(self, command: Command, **arguments: Any) -> list[Message]:
        try:
            with self._fence.guarding():  # another run would renew the store, and the members lose it
                # A sender that is still connecting does not notice that another has given up, until its own timeout.
                return await self._ranks.call(command, grace_s=self._epoch_timeout_s + GRACE_S, **arguments)
        except asyncio.CancelledError:
            self._kill_epoch()  # the caller gave up on a member, so the others should not wait for it either
            raise

    def _require_any_open(self) -> None:
        self._fence.require()
        if not self._roles:
            raise PreconditionFailed("no run is open on this trainer; call OpenRun", reason=Reason.RUN_NOT_OPEN)

    def _require_open(self, role: Role = Role.POLICY) -> contract.OpenRole:
        self._require_any_open()
        if role not in self._roles:
            raise InvalidInput(f"role: no {role} is open on this trainer", field="role")
        return self._roles[role]

    def _stand_in(self, role: Role) -> Role:
        """Returns the role whose model serves `role`: for a reference that is not open, a policy with adapters."""
        policy = self._roles.get(Role.POLICY)
        is_base = role is Role.REFERENCE and role not in self._roles and policy and policy.config.lora.rank
        return Role.POLICY if is_base else role
