"""Calls one rollout replica."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from itertools import count

from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.rollout.v1 import rollout_pb2_grpc
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.types.v1.types_pb2 import DeviceMemory, ModelCard, PolicyStamp, WeightGroup, WeightPlan

from services.common.config.operation import TimeoutsConfig
from services.common.config.run import Config
from services.common.errors import (
    InvalidInput,
    LockstepError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unauthenticated,
)
from services.common.rpc.client import MAX_RETRY_S, Answer, Client, Method, Renewal, Request
from services.common.rpc.tls import LOCAL, Transport
from services.common.tasks import backoff_s

log = logging.getLogger(__name__)

# Long enough for a connection that was reset. Other replicas wait while a replica that is gone is retried.
_MAX_RETRY_S = 2.0
_STILL_THERE_S = 5.0
# Number of attempts to put an engine to sleep while its last samples are ending: about half a minute.
_MAX_SLEEP_RETRIES = 8
# Errors that a retry cannot fix.
PERMANENT_ERRORS = (InvalidInput, PermissionDenied, Unauthenticated)


class ReplicaState(StrEnum):
    """The states of a replica. A DEAD one becomes STALE first: it has no weights until a publication."""

    DEAD = "dead"
    STALE = "stale"
    SERVING = "serving"


class Replica:
    """Calls one replica. `Rollout` decides which groups it gets."""

    def __init__(self, address: str, timeouts: TimeoutsConfig, transport: Transport = LOCAL):
        self.address = address
        self.state = ReplicaState.DEAD
        self.is_leaving = False
        """Whether it is to be dropped as soon as the run can do without it."""
        self.num_workers = self.max_samples = 0
        self.returns_routed_experts = False
        self.num_opens = 0
        self.incarnation = ""
        """Id of the service's process when it was opened last; empty if it has sent none."""
        self.quantized_digest = ""
        """Hash of the weights that its engine has quantized from those received last; empty if it quantizes none."""
        self.has_served = False
        """Whether it has ever had committed weights of the run."""
        self.samples_in_flight = self.tokens_in_flight = 0
        self._client = Client(address, rollout_pb2_grpc.RolloutServiceStub, transport)
        self._timeouts, self._renewal = timeouts, Renewal()

    async def open(self, run_id: str, config: Config, card: ModelCard) -> None:
        """Waits for the service, starts its engine and sets the state to STALE."""
        request = pb.OpenRunRequest(
            run_id=run_id,
            config_json=config.rollout.for_steps(config.num_steps).model_dump_json(),
            model_card=card,
            seed=config.seed,
            adapter_rank=config.trainer.lora.published_rank,
            can_sleep=config.takes_turns,
            return_routed_experts=config.wants_routed_experts,
        )
        # Before OpenRun, which begins the lease and may take longer than it.
        self._renewal.begin(self._client, RolloutService.GetInfo, pb.GetInfoRequest(), self._timeouts.lease_s)
        answer = await self._client.call_starting(RolloutService.OpenRun, request, timeout_s=self._timeouts.open_s)
        if config.trainer.moe.router_replay == "on" and not answer.returns_routed_experts:
            raise InvalidInput(
                f"trainer.moe.router_replay on: the engine at {self.address} returns no routed experts, because the "
                "model has no layers of experts or its vLLM cannot return them; set trainer.moe.router_replay to auto",
                field="trainer.moe.router_replay",
            )
        # After OpenRun, because the service may have been restarted while it was waited for.
        self.incarnation = await self.identify(MAX_RETRY_S)
        self.num_workers, self.max_samples = answer.num_workers, answer.max_samples
        self.returns_routed_experts = answer.returns_routed_experts
        self.num_opens += 1
        self.state = ReplicaState.STALE

    async def identify(self, max_retry_s: float = 0.0) -> str:
        """Returns the id of the service's process, which is the same at all addresses of the service.

        Raises:
            InvalidInput: The service is no rollout service.
            Unavailable: Nothing answers.
        """
        return (await self._info(max_retry_s)).info.incarnation

    async def close_run(self, run_id: str, *, opens_again: bool = False) -> None:
        """Closes the run. If the replica `opens_again`, which starts another engine, it is waited for."""
        request = pb.CloseRunRequest(run_id=run_id)
        timeout_s = self._timeouts.open_s if opens_again else self._timeouts.info_s
        await self._client.call(RolloutService.CloseRun, request, timeout_s=timeout_s, wait_for_ready=opens_again)

    async def is_alive(self) -> bool:
        """Returns whether the service answers and still has its engine."""
        try:
            return (await self._info(_MAX_RETRY_S)).num_workers > 0
        except LockstepError as error:
            log.warning("replica %s does not answer: %s", self.address, error.message)
            return False

    async def serves(self, stamp: PolicyStamp) -> bool:
        """Returns whether the process that was opened last answers within seconds, and serves these weights."""
        try:
            info = await self._info(longest_s=_STILL_THERE_S)
        except LockstepError:
            return False
        return info.info.incarnation == self.incarnation and info.stamp == stamp

    async def _info(self, max_retry_s: float = 0.0, longest_s: float = math.inf) -> pb.GetInfoResponse:
        timeout_s, request = min(longest_s, self._timeouts.info_s), pb.GetInfoRequest()
        return await self._client.call(RolloutService.GetInfo, request, timeout_s=timeout_s, max_retry_s=max_retry_s)

    def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields the sampled group of each prompt, as it is finished.

        Raises:
            Unavailable: The replica is unreachable; the group can go to another replica.
            PreconditionFailed: The replica serves other weights.
        """
        return self._client.stream(RolloutService.Generate, request, timeout_s=self._timeouts.generate_s)

    async def join(self, group: WeightGroup, base_rank: int, plan: WeightPlan) -> str:
        """Joins the weight group with all workers. Returns the digest of the plan that they built."""
        request = pb.JoinWeightGroupRequest(group=group, base_rank=base_rank, plan=plan)
        return (await self._publish(RolloutService.JoinWeightGroup, request)).plan_digest

    async def receive(self, epoch: int, version: int) -> PolicyStamp:
        """Receives one publication and returns its stamp. The replica is STALE until the weights are committed."""
        self.state = ReplicaState.STALE
        request = pb.ReceiveWeightsRequest(epoch=epoch, version=version)
        answer = await self._publish(RolloutService.ReceiveWeights, request)
        self.quantized_digest = answer.quantized_digest
        return PolicyStamp(version=version, digest=answer.digest)

    async def sleep(self, run_id: str = "") -> Sequence[DeviceMemory]:
        """Frees the engine's memory and returns the memory of each worker. The replica is STALE, without weights.

        Tries again while samples that were just canceled are still ending.

        Args:
            run_id: The run, if this is called before `open`: an engine that has the run open, because an earlier
                session opened it there, sleeps, and any other goes on.

        Raises:
            Unavailable: Nothing answers. It is not waited for before `open`.
        """
        if not run_id:
            self.state = ReplicaState.STALE
        request, max_retry_s = pb.SleepRequest(run_id=run_id), 0.0 if run_id else MAX_RETRY_S
        for num_retries in count():
            try:
                return (await self._switch(RolloutService.Sleep, request, max_retry_s)).workers
            except PreconditionFailed as error:
                if error.reason is not Reason.WRONG_STATE or num_retries == _MAX_SLEEP_RETRIES:
                    raise
            await asyncio.sleep(backoff_s(num_retries))
        raise AssertionError("unreachable")

    async def wake(self, part: pb.EnginePart) -> Sequence[DeviceMemory]:
        """Takes memory for one part of the engine and returns the memory of each worker.

        Raises:
            Overloaded: OUT_OF_MEMORY, a device has too little; nothing was taken.
        """
        return (await self._switch(RolloutService.Wake, pb.WakeRequest(part=part))).workers

    async def commit(self, stamp: PolicyStamp) -> None:
        await self._publish(RolloutService.CommitWeights, pb.CommitWeightsRequest(stamp=stamp))
        self.state, self.has_served = ReplicaState.SERVING, True

    async def _publish(self, method: Method[Request, Answer], request: Request) -> Answer:
        # Not repeated if it is lost: a publication that fails begins again with a new epoch.
        return await self._client.call(method, request, timeout_s=self._timeouts.publish_s)

    async def _switch(
        self, method: Method[Request, Answer], request: Request, max_retry_s: float = MAX_RETRY_S
    ) -> Answer:
        return await self._client.call(method, request, timeout_s=self._timeouts.memory_s, max_retry_s=max_retry_s)

    async def close(self) -> None:
        await self._renewal.end()
        await self._client.close()


def why_not_open(error: LockstepError) -> str:
    if error.reason is not Reason.UNREACHABLE:
        return error.message
    # gRPC: failed to connect to all addresses; last error: UNKNOWN: ipv4:...: Failed to connect ...: Connection refused
    return f"unreachable: {error.message.rpartition(': ')[2].partition(' (')[0].lower()}"
