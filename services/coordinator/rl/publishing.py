"""Publishes weights in two phases (receive, commit) and re-forms the weight group when its members change.

In a colocated run trainer and engines hold their GPUs one after the other. The trainer gets the GPUs when the engines
sleep, which drops their weights. A publication hands the GPUs back: the trainer frees the memory that only updates
need, the engines take memory for weights and receive them, the trainer frees the rest, and the engines take memory for
their KV cache. Memory of the trainer that fits beside an engine that is awake stays on the GPU: moving it to the host
and back would take most of a switch. If the trainer changed no weights meanwhile, for example because it only saved a
checkpoint, the same weights are published again.
"""

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Never, TypeVar

from lockstep.rollout.v1.rollout_pb2 import ENGINE_PART_KV_CACHE, ENGINE_PART_WEIGHTS
from lockstep.trainer.v1 import trainer_pb2
from lockstep.trainer.v1.trainer_pb2 import MODEL_PART_OPTIMIZER, MODEL_PART_PARAMETERS, OpenRunResponse
from lockstep.types.v1.types_pb2 import DeviceMemory, PolicyStamp, WeightGroup

from services.common.errors import (
    Aborted,
    DeadlineExceeded,
    LockstepError,
    PreconditionFailed,
    Reason,
    Unavailable,
    counted,
)
from services.common.tasks import gather
from services.coordinator.clients.gpus import SharedGpus, Side
from services.coordinator.clients.replica import Replica, ReplicaState
from services.coordinator.clients.rollout import Rollout
from services.coordinator.clients.trainer import Trainer, role_of
from services.coordinator.fleet.opening import Services
from services.coordinator.runs.run import Run

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Number of attempts in a row after which a replica is dropped. A single one can be due to a busy host or network.
_MAX_MISSES = 2


class Attendance:
    """Counts for each replica how many attempts in a row it missed."""

    def __init__(self, grace_s: float):
        """When a member has given up, the others have `grace_s` seconds to notice and to answer."""
        self._grace_s = grace_s
        self._ranks: Mapping[Replica, range] = {}
        self._absent: Sequence[Replica] = ()  # in the last phase, if it failed
        self._misses: Counter[Replica] = Counter()

    def assign_ranks(self, replicas: Sequence[Replica], first: int) -> Mapping[Replica, range]:
        """Gives each replica's workers their ranks in a weight group, from `first` on, and returns the ranks."""
        ends = accumulate((replica.num_workers for replica in replicas), initial=first)
        self._ranks = {replica: range(*ranks) for replica, ranks in zip(replicas, pairwise(ends), strict=True)}
        return self._ranks

    async def gather(
        self,
        replicas: Sequence[Replica],
        calls: Sequence[Coroutine[object, Never, Result]],
        *trainer: Coroutine[object, Never, Result],
    ) -> list[Result]:
        """Runs one call to each of `replicas` and, if given, the trainer's. Returns their results in this order.

        Raises:
            LockstepError: RUN_REPLACED if a service answered so, else the first failure. Its message names the
                replicas that did not take part.
        """
        self._absent = ()
        tasks = [asyncio.ensure_future(call) for call in (*calls, *trainer)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failures = _failures(tasks)
            if not failures:
                return [task.result() for task in tasks]
            self._absent = self._named(failures)
            # A member that gave up has told the others, and commits do not depend on one another: all should answer.
            reasons = {error.reason for error in failures if isinstance(error, LockstepError)}
            if not self._absent and (not trainer or Reason.EPOCH_ABORTED in reasons):
                await asyncio.wait(tasks, timeout=self._grace_s)
                failures = _failures(tasks)
                self._absent = self._named(failures) or _silent(replicas, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for error in failures:
            if isinstance(error, LockstepError) and error.reason is Reason.RUN_REPLACED:
                raise error  # it is the cause of the others
        self._misses.update(self._absent)
        first = failures[0]
        if not self._absent or not isinstance(first, LockstepError):
            raise first
        addresses = " and ".join(replica.address for replica in self._absent)
        message = f"replica {addresses} did not take part: {first.message}"
        raise type(first)(message, reason=first.reason, **first.metadata)

    def took_part(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            # A Counter ignores that a key is missing.
            del self._misses[replica]

    def to_drop(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Returns those of `replicas` that missed too many attempts; none if all of them missed the last one."""
        missed = [replica for replica in replicas if replica in self._absent]
        if len(missed) == len(replicas):  # then the trainer or the network may be the cause
            return []
        return [replica for replica in missed if self._misses[replica] >= _MAX_MISSES]

    def _named(self, failures: Sequence[BaseException]) -> list[Replica]:
        """Returns the replicas that the members of the weight group have named as absent."""
        named = [error.metadata.get("absent", "") for error in failures if isinstance(error, LockstepError)]
        ranks = {int(rank) for names in named for rank in names.split(",") if rank}
        return [replica for replica, own in self._ranks.items() if ranks & set(own)]


def _failures(tasks: Sequence[asyncio.Task[object]]) -> list[BaseException]:
    return [error for task in tasks if task.done() and (error := task.exception())]


def _silent(replicas: Sequence[Replica], tasks: Sequence[asyncio.Task[object]]) -> list[Replica]:
    """Returns the replicas without an answer; none if the trainer, which may be the cause, has none either."""
    is_silent = [not task.done() or isinstance(task.exception(), DeadlineExceeded) for task in tasks]
    if any(is_silent[len(replicas) :]):
        return []
    return [replica for replica, silent in zip(replicas, is_silent, strict=False) if silent]


# Attempts with the same members: enough for a transient fault such as a lost packet, after which the error is raised.
_MAX_ATTEMPTS = 3


def weight_group(run: Run, opened: OpenRunResponse, epoch: int, num_workers: int) -> WeightGroup:
    """Returns the weight group of a trainer, which answered `opened` to OpenRun, and of `num_workers` engine workers.

    The trainer's members are the ranks that send or, if trainer and engines share GPUs, all ranks.
    """
    num_ranks = opened.num_ranks if run.config.placement == "colocated" else 0
    return WeightGroup(
        run_id=run.run_id,
        epoch=epoch,
        store_host=opened.store_host,
        store_port=opened.store_port,
        store_secret=opened.store_secret,
        world_size=(num_ranks or opened.plan.num_senders) + num_workers,
        backend="pairs" if num_ranks else opened.weight_backend,
        num_trainer_ranks=num_ranks,
        timeout_s=run.config.weights.timeout_s,
    )


def require_same_quantized(replicas: Sequence[Replica]) -> None:
    """Raises QUANTIZED_MISMATCH if replicas made different weights of those that all of them have received."""
    digests = {replica.address: replica.quantized_digest for replica in replicas}
    if len(set(digests.values())) > 1:
        raise PreconditionFailed(
            f"replicas have quantized the same weights differently: {digests}; rollout.precision fp8 needs the same "
            "kind of GPU and the same vLLM for all of them, or set rollout.precision to auto",
            reason=Reason.QUANTIZED_MISMATCH,
        )


def require_same_experts(replicas: Sequence[Replica]) -> None:
    """Raises PreconditionFailed if some replicas return routed experts and others do not."""
    without = [replica.address for replica in replicas if not replica.returns_routed_experts]
    if 0 < len(without) < len(replicas):
        raise PreconditionFailed(
            f"replica {' and '.join(without)} returns no routed experts, but others do: only a part of each batch "
            "would be trained with them; use the same vLLM for all replicas, or set trainer.moe.router_replay to off"
        )


class Publisher:
    """Forms the weight group, broadcasts the weights, verifies and commits them, and records the publication."""

    def __init__(self, trainer: Trainer, rollout: Rollout, run: Run):
        self._trainer, self._rollout, self._run = trainer, rollout, run
        self._epoch = 0
        # Each replica with its `num_opens` when it joined: a replica that was reopened has to join again.
        self._members: Sequence[tuple[Replica, int]] = ()
        self._attendance = Attendance(run.config.weights.timeout_s)

    async def publish(self, version: int) -> PolicyStamp:
        """Makes every replica that is not DEAD serve the trainer's weights. Returns their stamp.

        A replica is dropped if it fails, or if it misses two attempts in a row. The others then get the weights in a
        new epoch. If none is left and the run itself is restarting one, that one is awaited.

        Raises:
            Unavailable: NO_REPLICA, no replica is left; or the trainer is unreachable.
            LockstepError: All attempts with the same members failed.
        """
        attempts = 0
        # Replicas come and go at publications, because a new one has no weights before.
        if self._rollout.before_publication:
            await self._rollout.before_publication()
        while True:
            self._rollout.check()
            if not await self._rollout.await_restart():
                raise self._rollout.no_replica("no rollout replica is left to publish weights to")
            try:
                with self._rollout.publishing() as living:
                    await self._prepare(living)
                    if list(self._members) != [(replica, replica.num_opens) for replica in living]:
                        await self._form_group(living)
                    stamp, received = await self._send(version)
                self._attendance.took_part(living)
                await self._run.record.ledger.free()
                self._run.record.record_published(stamp, received, living[0].quantized_digest)
                self._let_repeat(version)
                return stamp
            except asyncio.CancelledError:  # of a repetition that no group waits for any more
                self._members = ()
                raise
            except (Aborted, Unavailable, DeadlineExceeded, PreconditionFailed) as error:
                if error.reason in (Reason.RUN_REPLACED, Reason.STORAGE_FAILED):
                    raise
                self._members = ()
                attempts += 1
                lost = await self._rollout.drop_unreachable() + self._drop_hung()
                log.warning(
                    "publication of version %d failed, %s lost: %s", version, counted(lost, "replica"), error.message
                )
                if not lost and attempts >= _MAX_ATTEMPTS:
                    if not self._rollout.refuse_newcomers(error):
                        raise
                    attempts = 0  # the others may do without the newcomers

    def _let_repeat(self, version: int) -> None:
        """Lets a replica that is lost while it generates get the same weights again.

        Not with a lag: the trainer trains meanwhile, and no longer has these weights. Not where both take turns: the
        GPUs pass to the engines in a publication, and no engine can be started then.
        """
        config = self._run.config
        if not config.trainer.lag.versions and not config.takes_turns:
            self._rollout.publish_again = functools.partial(self.publish, version)

    def _drop_hung(self) -> int:
        """Drops the replicas that missed too many attempts, and has their engines restarted. Returns how many."""
        living = self._rollout.members
        hung = self._attendance.to_drop(living)
        for replica in hung:
            why = Unavailable("its engine hangs: it missed two attempts in a row to publish weights")
            self._rollout.mark_dead(replica, why, restart=True)
        return len(hung)

    async def _form_group(self, replicas: Sequence[Replica]) -> None:
        require_same_experts(replicas)
        opened = self._trainer.opened
        await self._run.record.ledger.free()
        # From the ledger, so that epochs also grow from session to session: members refuse older ones.
        self._epoch = self._run.record.next_epoch(len(replicas))
        num_workers = sum(replica.num_workers for replica in replicas)
        group = weight_group(self._run, opened, self._epoch, num_workers)
        ranks = self._attendance.assign_ranks(replicas, group.world_size - num_workers)
        joins = [replica.join(group, ranks[replica].start, opened.plan) for replica in replicas]
        plans = await self._attendance.gather(replicas, joins, self._trainer.join(group))
        if len(set(plans)) != 1:
            raise PreconditionFailed(
                f"members of the weight group built different plans: {set(plans)}", reason=Reason.PLAN_MISMATCH
            )
        self._members = [(replica, replica.num_opens) for replica in replicas]

    async def _send(self, version: int) -> tuple[PolicyStamp, dict[str, str]]:
        """Returns the stamp, and the digest that each replica received, by address."""
        replicas = [replica for replica, _ in self._members]
        receiving = [replica.receive(self._epoch, version) for replica in replicas]
        *received, stamp = await self._attendance.gather(replicas, receiving, self._trainer.send(self._epoch, version))
        digests = [received_stamp.digest for received_stamp in received]
        if set(digests) != {stamp.digest}:
            raise PreconditionFailed(f"sent {stamp.digest}, received {digests}", reason=Reason.DIGEST_MISMATCH)
        require_same_quantized(replicas)
        await self._commit(replicas, stamp)
        return stamp, {replica.address: digest for replica, digest in zip(replicas, digests, strict=True)}

    async def _prepare(self, replicas: Sequence[Replica]) -> None:
        """Prepares an attempt: nothing, if trainer and replicas have memory of their own."""

    async def _commit(self, replicas: Sequence[Replica], stamp: PolicyStamp) -> None:
        await self._attendance.gather(replicas, [replica.commit(stamp) for replica in replicas])


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
        self._takes_all = False  # whether engines may have taken memory beyond that for their weights
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
            memory = await gather(replica.sleep() for replica in self._living_replicas())
        except (Unavailable, DeadlineExceeded):
            if not await self._rollout.drop_unreachable():
                raise
            memory = await gather(replica.sleep() for replica in self._living_replicas())
        _log("the engines sleep", begin, *memory)
        self._takes_all = False
        needed = (
            worker.freed_bytes + int(_SPARE_SHARE * worker.device_total_bytes)
            for worker in chain(*memory)
            if worker.freed_bytes  # otherwise it was asleep already
        )
        self._needed_bytes = max([self._needed_bytes, *needed])

    async def _prepare(self, replicas: Sequence[Replica]) -> None:
        if self._takes_all:  # the attempt before this one failed too late for the trainer's weights to fit beside
            await self._sleep()
        begin = time.perf_counter()
        needed = self._needed_bytes
        # What is not sent leaves first, so that the weights that are sent find room if they had left.
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
        # The engines have taken what their weights need; the rest of what they need must still be free.
        needed = max(0, self._needed_bytes - self._weights_bytes)
        memory = await self._trainer.release_memory(
            MODEL_PART_PARAMETERS, MODEL_PART_OPTIMIZER, least_free_bytes=needed
        )
        _log("the trainer frees its memory", begin, memory)
        # Before the calls: if one of them fails, other engines may have taken their memory.
        self._takes_all = True
        begin = time.perf_counter()
        _log("the engines take the KV cache", begin, *await gather(r.wake(ENGINE_PART_KV_CACHE) for r in replicas))
        await super()._commit(replicas, stamp)

    def _living_replicas(self) -> list[Replica]:
        return [replica for replica in self._rollout.replicas if replica.state is not ReplicaState.DEAD]


def _log(what: str, begin: float, *answers: Iterable[DeviceMemory]) -> None:
    """Logs the time and memory that a phase took, and the memory that is left on the fullest device."""
    devices = list(chain(*answers))
    freed, taken = sum(device.freed_bytes for device in devices), sum(device.taken_bytes for device in devices)
    free = min((device.device_free_bytes for device in devices if device.device_total_bytes), default=0)
    numbers = time.perf_counter() - begin, freed / 1e9, taken / 1e9, free / 1e9
    log.info("%s: %.2f s, %.2f GB freed, %.2f GB taken, %.2f GB free", what, *numbers)
