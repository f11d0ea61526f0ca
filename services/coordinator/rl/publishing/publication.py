"""Publishes weights in two phases (receive, commit) and re-forms the weight group when its members change."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence

from lockstep.trainer.v1.trainer_pb2 import OpenRunResponse
from lockstep.types.v1.types_pb2 import PolicyStamp, WeightGroup

from services.common.counted import counted
from services.common.errors import Aborted, DeadlineExceeded, PreconditionFailed, Reason, Unavailable
from services.coordinator.rl.publishing.attendance import Attendance
from services.coordinator.runs.run import Run
from services.coordinator.services.clients.replica import Replica
from services.coordinator.services.clients.rollout import Rollout
from services.coordinator.services.clients.trainer import Trainer

log = logging.getLogger(__name__)

# Attempts with the same members: enough for a transient fault such as a lost packet, after which the error is raised.
_MAX_ATTEMPTS = 3


def weight_group(run: Run, opened: OpenRunResponse, epoch: int, num_workers: int) -> WeightGroup:
    """Returns the weight group of the senders of the trainer that returned `opened`, and of `num_workers` engine
    workers. If they share GPUs, all ranks are members.
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


class Publisher:
    """Forms the weight group, broadcasts the weights, verifies and commits them, and records the publication."""

    def __init__(self, trainer: Trainer, rollout: Rollout, run: Run):
        self._trainer, self._rollout, self._run = trainer, rollout, run
        self._epoch = 0
        # Each replica with its `num_opens` when it joined: a replica that was reopened has to join again.
        self._members: Sequence[tuple[Replica, int]] = ()
        self._attendance = Attendance(run.config.weights.timeout_s)
        self.before_record: Callable[[], Awaitable[None]] | None = None
        """Is awaited before anything is recorded."""

    async def publish(self, version: int) -> PolicyStamp:
        """Makes every replica that is not DEAD serve the trainer's weights. Returns their stamp.

        A replica that fails, or that does not take part twice in a row, is dropped, and the others get the weights in a
        new epoch. If none is left, the one that the run itself is restarting is awaited.

        Raises:
            Unavailable: NO_REPLICA, no replica is left; or the trainer is unreachable.
            LockstepError: All attempts with the same members failed.
        """
        attempts = 0
        if self._rollout.before_publication:
            await self._rollout.before_publication()
        while True:
            self._rollout.check()
            if not await self._rollout.await_restart():
                raise self._rollout.no_replica("no rollout replica is left to publish weights to")
            living = self._rollout.members
            try:
                await self._prepare(living)
                if list(self._members) != [(replica, replica.num_opens) for replica in living]:
                    await self._form_group(living)
                stamp, received = await self._send(version)
                self._attendance.took_part(living)
                self._rollout.drop_leavers()
                await self._await_record()
                self._run.record.record_published(stamp, received)
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
                    attempts = 0

    async def _await_record(self) -> None:
        if self.before_record:
            await self.before_record()

    def _let_repeat(self, version: int) -> None:
        """Lets a replica that was lost while it generated get the same weights again.

        That needs a trainer that holds them until the groups are sampled: not one that trains meanwhile (trainer.lag).
        In a colocated run, an engine cannot be started while the GPUs pass to the engines, as in a publication.
        """
        config = self._run.config
        if not config.trainer.lag.versions and config.placement != "colocated":
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
        opened = self._trainer.opened
        await self._await_record()
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
        await self._commit(replicas, stamp)
        return stamp, {replica.address: digest for replica, digest in zip(replicas, digests, strict=True)}

    async def _prepare(self, replicas: Sequence[Replica]) -> None:
        """Prepares an attempt. Nothing is needed if trainer and replicas have memory of their own."""

    async def _commit(self, replicas: Sequence[Replica], stamp: PolicyStamp) -> None:
        """Makes the replicas serve the received weights."""
        await self._attendance.gather(replicas, [replica.commit(stamp) for replica in replicas])
