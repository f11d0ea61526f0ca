"""Publishes weights in a colocated run, where trainer and engines hold their GPUs one after the other.

The trainer gets the GPUs when the engines sleep, which drops their weights. A publication hands the GPUs back: the
trainer frees the memory that only updates need, the engines take memory for weights and receive them, the trainer frees
the rest, and the engines take memory for their KV cache. Memory of the trainer that fits beside an engine that is awake
stays on the GPU: moving it to the host and back would take most of a switch. If the trainer changed no weights
meanwhile, for example because it only saved a checkpoint, the same weights are published again.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from itertools import chain

from lockstep.rollout.v1.rollout_pb2 import ENGINE_PART_KV_CACHE, ENGINE_PART_WEIGHTS
from lockstep.trainer.v1 import trainer_pb2
from lockstep.trainer.v1.trainer_pb2 import MODEL_PART_OPTIMIZER, MODEL_PART_PARAMETERS
from lockstep.types.v1.types_pb2 import DeviceMemory, PolicyStamp

from services.common.errors import DeadlineExceeded, Unavailable
from services.common.tasks import gather
from services.coordinator.clients.gpus import SharedGpus, Side
from services.coordinator.clients.replica import Replica, ReplicaState
from services.coordinator.clients.trainer import role_of
from services.coordinator.fleet.opening import Services
from services.coordinator.rl.publishing.publication import Publisher
from services.coordinator.runs.run import Run

log = logging.getLogger(__name__)

# Share of a GPU that is left free where the trainer's memory stays: for the engine's activations, the buffers of a
# publication, and what the processes allocate outside torch.
_SPARE_SHARE = 0.05


def make_publisher(services: Services, run: Run) -> Publisher:
    if isinstance(services.gpus, SharedGpus):
        return ColocatedPublisher(services, run, services.gpus)
    return Publisher(services.trainer, services.rollout, run)


class ColocatedPublisher(Publisher):
    """Publishes weights whenever the GPUs pass from the trainer to the engines."""

    def __init__(self, services: Services, run: Run, gpus: SharedGpus):
        super().__init__(services.trainer, services.rollout, run)
        self._gpus, self._version = gpus, 0
        self._prepared = 0.0  # when the weights could be sent
        self._needed_bytes = 0  # free bytes that a GPU needs so that its engine can wake; 0 if unknown
        self._weights_bytes = 0  # the part of it that all engines have taken for their weights
        self._other_roles = [role_of(name) for name in run.config.models if name != "trainer"]
        gpus.on_switch({Side.TRAINER: self._to_trainer, Side.ENGINES: self._to_engines})

    async def publish(self, version: int) -> PolicyStamp:
        async with self._gpus.passing_to_engines() as side:
            if side is Side.ENGINES:
                await self._sleep()
            self._version = version
            return await super().publish(version)

    async def _to_trainer(self) -> None:
        await self._sleep()
        begin = time.perf_counter()
        memory = await self._trainer.acquire_memory(MODEL_PART_PARAMETERS, MODEL_PART_OPTIMIZER)
        _log("the trainer takes its memory", begin, memory)

    async def _to_engines(self) -> None:
        await super().publish(self._version)

    async def _sleep(self) -> None:
        """Puts the engines to sleep. A replica that is lost has no memory, and is dropped."""
        begin = time.perf_counter()
        try:
            memory = await gather(replica.sleep() for replica in self._living())
        except (Unavailable, DeadlineExceeded):
            if not await self._rollout.drop_unreachable():
                raise
            memory = await gather(replica.sleep() for replica in self._living())
        _log("the engines sleep", begin, *memory)
        needed = (
            worker.freed_bytes + int(_SPARE_SHARE * worker.device_total_bytes)
            for worker in chain(*memory)
            if worker.freed_bytes  # otherwise it was asleep already
        )
        self._needed_bytes = max([self._needed_bytes, *needed])

    async def _prepare(self, replicas: Sequence[Replica]) -> None:
        begin = time.perf_counter()
        needed = self._needed_bytes
        await self._trainer.release_memory(MODEL_PART_OPTIMIZER, least_free_bytes=needed)
        if self._other_roles:
            await self._trainer.release_memory(MODEL_PART_PARAMETERS, roles=self._other_roles, least_free_bytes=needed)
        memory = await self._trainer.acquire_memory(MODEL_PART_PARAMETERS, roles=[trainer_pb2.ROLE_POLICY])
        _log("the trainer keeps the weights", begin, memory)
        begin = time.perf_counter()
        woken = await gather(r.wake(ENGINE_PART_WEIGHTS) for r in replicas)
        _log("the engines take memory for weights", begin, *woken)
        taken = [worker.taken_bytes for worker in chain(*woken)]
        # On the GPU of a lost replica, none of what its engine will need when it starts again is taken yet.
        self._weights_bytes = min(taken) if len(replicas) == len(self._rollout.replicas) else 0
        self._prepared = time.perf_counter()

    async def _commit(self, replicas: Sequence[Replica], stamp: PolicyStamp) -> None:
        _log("the engines receive the weights", self._prepared)
        begin = time.perf_counter()
        needed = max(0, self._needed_bytes - self._weights_bytes)
        memory = await self._trainer.release_memory(
            MODEL_PART_PARAMETERS, MODEL_PART_OPTIMIZER, least_free_bytes=needed
        )
        _log("the trainer frees its memory", begin, memory)
        begin = time.perf_counter()
        _log("the engines take the KV cache", begin, *await gather(r.wake(ENGINE_PART_KV_CACHE) for r in replicas))
        await super()._commit(replicas, stamp)

    def _living(self) -> list[Replica]:
        return [replica for replica in self._rollout.replicas if replica.state is not ReplicaState.DEAD]


def _log(what: str, begin: float, *answers: Iterable[DeviceMemory]) -> None:
    """Logs the time and memory that a phase took, and the memory that is left on the fullest device."""
    devices = list(chain(*answers))
    freed, taken = sum(device.freed_bytes for device in devices), sum(device.taken_bytes for device in devices)
    free = min((device.device_free_bytes for device in devices if device.device_total_bytes), default=0)
    numbers = time.perf_counter() - begin, freed / 1e9, taken / 1e9, free / 1e9
    log.info("%s: %.2f s, %.2f GB freed, %.2f GB taken, %.2f GB free", what, *numbers)
