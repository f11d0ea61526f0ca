"""Trainer deployments: the policy and the models beside it."""

from collections.abc import AsyncIterator, Mapping

import pyarrow as pa
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp, WeightGroup

from services.common import batch as batches
from services.common.config.run import Config
from services.common.rpc.address import parse_address
from services.common.rpc.client import Client
from services.common.rpc.tls import LOCAL, Transport

# Section of the config -> role, and what Forward answers -> column of the batch.
_ROLES: Mapping[str, tuple[pb.Role, str, str]] = {
    "trainer": (pb.ROLE_POLICY, "logprobs", "old_logprobs"),
    "reference": (pb.ROLE_REFERENCE, "logprobs", "ref_logprobs"),
    "critic": (pb.ROLE_CRITIC, "values", "values"),
}


class Model:
    """One model of a run, by the name of its section in the config: on ranks of its own or beside others."""

    def __init__(self, name: str, address: str, config: Config, transport: Transport = LOCAL):
        self.name = name
        self._client = Client(address, trainer_pb2_grpc.TrainerServiceStub, transport)
        self._config, self._timeouts = config, config.timeouts
        self._role, self._answer, self.column = _ROLES[name]
        self.opened: pb.OpenRunResponse = pb.OpenRunResponse()

    async def open(self, run_id: str, checkpoint: str = "") -> int:
        """Loads the model or `checkpoint` (a path, or empty); returns the version that its ranks now hold."""
        section = getattr(self._config, self.name)
        request = pb.OpenRunRequest(
            run_id=run_id,
            config_json=self._config.models[self.name].model_dump_json(),
            model_path=getattr(section, "model", None) or self._config.model,
            checkpoint_path=checkpoint,
            seed=self._config.seed,
            bucket_bytes=self._config.weights.bucket_bytes,
            role=self._role,
        )
        self.opened = await self._client.call(
            TrainerService.OpenRun, request, timeout_s=self._timeouts.open_s, wait_for_ready=True
        )
        # A trainer that listens on all interfaces cannot know which of them reaches it: this one does.
        self.opened.store_host = self.opened.store_host or parse_address(self._client.address, field=self.name)[0]
        return self.opened.version

    async def forward(self, batch: pa.Table) -> pa.ChunkedArray:
        """What the model says of every completion token of `batch`: log-probabilities, or a critic's values."""
        header = pb.ForwardHeader(role=self._role, temperature=self._temperature)
        requests = _framed(pb.ForwardRequest, header, batch)
        answers = self._client.stream(TrainerService.Forward, requests, timeout_s=self._timeouts.train_s)
        return batches.decode([answer.frame async for answer in answers])[self._answer]

    async def train(
        self, batch: pa.Table, batch_id: str, stamp: PolicyStamp, critic_version: int = 0
    ) -> tuple[int, dict[str, float]]:
        """One update on `batch`, which must be drawn from `stamp`; the new version and metrics.

        Safe to repeat: the trainer applies a batch id once.
        """
        header = pb.TrainHeader(
            expected_stamp=stamp,
            batch_id=batch_id,
            temperature=self._temperature,
            role=self._role,
            critic_version=critic_version,
        )
        requests = _framed(pb.TrainRequest, header, batch)
        answer = await self._client.call(TrainerService.Train, requests, timeout_s=self._timeouts.train_s)
        return answer.version, dict(answer.metrics)

    async def save(self, path: str, version: int) -> str:
        """Writes a checkpoint of `version`, which must be held; the SHA-256 of its manifest."""
        request = pb.SaveCheckpointRequest(path=path, version=version, role=self._role)
        answer = await self._client.call(TrainerService.SaveCheckpoint, request, timeout_s=self._timeouts.checkpoint_s)
        return answer.manifest_digest

    async def close(self) -> None:
        """Closes the channel."""
        await self._client.close()

    @property
    def _temperature(self) -> float:
        return self._config.rollout.sampling.temperature


class Trainer(Model):
    """The policy: also publishes its weights and exports them."""

    def __init__(self, address: str, config: Config, transport: Transport = LOCAL):
        super().__init__("trainer", address, config, transport)

    async def join(self, group: WeightGroup) -> str:
        """Enters the weight group as its first members; the digest of the plan as the trainer built it."""
        request = pb.JoinWeightGroupRequest(group=group)
        answer = await self._client.call(TrainerService.JoinWeightGroup, request, timeout_s=self._timeouts.publish_s)
        return answer.plan_digest

    async def send(self, epoch: int, version: int) -> PolicyStamp:
        """Broadcasts the policy; the stamp of what was sent."""
        request = pb.SendWeightsRequest(epoch=epoch, version=version)
        answer = await self._client.call(TrainerService.SendWeights, request, timeout_s=self._timeouts.publish_s)
        return answer.stamp

    async def export(self, path: str) -> None:
        """Writes the policy as a Hugging Face model directory."""
        request = pb.ExportHuggingFaceRequest(path=path)
        await self._client.call(TrainerService.ExportHuggingFace, request, timeout_s=self._timeouts.checkpoint_s)


async def _framed(kind: type, header: object, batch: pa.Table) -> AsyncIterator[pb.ForwardRequest | pb.TrainRequest]:
    yield kind(header=header)
    for frame in batches.encode(batch):
        yield kind(frame=frame)
