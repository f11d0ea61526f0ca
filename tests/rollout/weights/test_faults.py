"""Tests publications that go wrong. The test plays the trainer, so it can break anything at any point."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.errors import Aborted, InvalidInput, PreconditionFailed, Reason
from services.common.weights.group import WeightGroup
from tests.rollout.rollout_stack import PlayedTrainer, greedy_by_transformers
from tests.support import raises

SILENT_SENDER = Path(__file__).parents[1] / "silent_sender.py"


class Wire:
    """Wraps a group, and can change what is broadcast after the sender has hashed it."""

    def __init__(self, group: WeightGroup):
        self._group, self.device, self.rank = group, group.device, group.rank
        self.sender, self.num_trainer_ranks, self.begin, self.buffer = group.sender, 0, group.begin, group.buffer
        self.num_broadcasts = 0

    def broadcast(self, flat: torch.Tensor, sender: int) -> torch.distributed.Work:
        self.num_broadcasts += 1
        return self._group.broadcast(self.spoil(flat), sender)

    def spoil(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    def wait(self, work: torch.distributed.Work) -> None:
        self._group.wait(work)

    def acknowledged(self, version: int) -> list[str]:
        return self._group.acknowledged(version)


class FlipsOneBit(Wire):
    def spoil(self, flat: torch.Tensor) -> torch.Tensor:
        if self.num_broadcasts != 3:
            return flat
        damaged = flat.clone()
        damaged[flat.numel() // 2] ^= 1
        return damaged


class SenderStopped(Exception): ...


class StopsAfter(Wire):
    """Ends the sender after `num` buckets; several of them make up one layer."""

    def __init__(self, group: WeightGroup, num: int):
        super().__init__(group)
        self._num = num

    def spoil(self, flat: torch.Tensor) -> torch.Tensor:
        if self.num_broadcasts > self._num:
            raise SenderStopped
        return flat


async def assert_serves_nothing(played: PlayedTrainer, *stamps: PolicyStamp) -> None:
    assert not (await played.replica.info()).HasField("stamp")
    for stamp in stamps:
        with raises(PreconditionFailed, reason=Reason.NOT_SERVING):
            await played.replica.greedy(stamp)


async def assert_next_is_exact(played: PlayedTrainer, version: int) -> PolicyStamp:
    """Asserts that the replica can be reloaded: it serves new weights of a new epoch exactly."""
    played.draw(seed=version)
    stamp = await played.publish(version)
    await played.assert_exact(stamp)
    return stamp


async def test_only_the_committed_stamp_is_served(played: PlayedTrainer):
    stamp = await assert_next_is_exact(played, 5)
    for version, digest, reason in (
        (4, stamp.digest, Reason.STALE_STAMP),
        (6, stamp.digest, Reason.FUTURE_STAMP),
        (5, "0" * 32, Reason.DIGEST_MISMATCH),
    ):
        with raises(PreconditionFailed, reason=reason) as raised:
            await played.replica.greedy(PolicyStamp(version=version, digest=digest))
        assert raised.value.metadata["held_digest"] == stamp.digest
    with raises(InvalidInput, field="expected_stamp"):
        await played.replica.greedy(PolicyStamp())


async def test_nothing_is_served_between_receive_and_commit(played: PlayedTrainer):
    before = await assert_next_is_exact(played, 10)
    played.draw(seed=11)
    group = await played.join()
    sent, _ = await asyncio.gather(played.send(group, 11), played.replica.receive(played.epoch, 11))
    group.abort()
    stamp = PolicyStamp(version=11, digest=sent.digest)
    await assert_serves_nothing(played, before, stamp)
    for wrong in (PolicyStamp(version=11, digest=before.digest), PolicyStamp(version=10, digest=sent.digest), before):
        with raises(PreconditionFailed, reason=Reason.DIGEST_MISMATCH):
            await played.replica.commit(wrong)
        await assert_serves_nothing(played, before, stamp, wrong)
    await played.replica.commit(stamp)
    await played.replica.commit(stamp)  # a repeated commit is answered
    await played.assert_exact(stamp)


async def test_one_flipped_bit_is_noticed_and_nothing_is_served(played: PlayedTrainer):
    before = await assert_next_is_exact(played, 20)
    played.draw(seed=21)
    group = await played.join()
    wire = FlipsOneBit(group)
    sent, received = await asyncio.gather(
        played.send(wire, 21), played.replica.receive(played.epoch, 21), return_exceptions=True
    )
    group.abort()
    assert isinstance(sent, PreconditionFailed)
    assert sent.reason is Reason.DIGEST_MISMATCH
    intended = sent.metadata["sent"]
    assert received.digest != intended
    with raises(PreconditionFailed, reason=Reason.DIGEST_MISMATCH):
        await played.replica.commit(PolicyStamp(version=21, digest=intended))
    await assert_serves_nothing(played, before, PolicyStamp(version=21, digest=intended))
    await assert_next_is_exact(played, 22)


async def joined(played: PlayedTrainer, timeouts_s: Sequence[float]) -> WeightGroup:
    """Joins with the first of `timeouts_s` that is long enough for this machine."""
    *others, last = timeouts_s
    for timeout_s in others:
        with contextlib.suppress(Aborted):
            return await played.join(timeout_s=timeout_s)
    return await played.join(timeout_s=last)


# Two buckets bring q_proj without k_proj and v_proj, six bring gate_proj without up_proj: layers that vLLM fuses.
@pytest.mark.parametrize(
    ("num_buckets", "gives_up"), [pytest.param(1, True, marks=pytest.mark.long), (2, True), (6, True), (2, False)]
)
async def test_a_publication_that_ends_half_way_leaves_the_replica_reloadable(
    played: PlayedTrainer, num_buckets: int, gives_up: bool
):
    """A sender that gives up says so, and nobody waits; one that just falls silent costs the timeout."""
    before = await assert_next_is_exact(played, 30)
    played.draw(seed=31)
    group = await joined(played, (20.0,) if gives_up else (3.0, 12.0, 48.0))

    async def stop_half_way() -> None:
        with pytest.raises(SenderStopped):
            await played.send(StopsAfter(group, num_buckets), 31)
        if gives_up:
            group.kill()

    with pytest.raises(Aborted, match="another member gave up" if gives_up else r"waited [\d.]+ s for") as raised:
        await asyncio.gather(stop_half_way(), played.replica.receive(played.epoch, 31))
    assert raised.value.metadata["epoch"] == str(played.epoch)
    group.abort()
    await assert_serves_nothing(played, before)
    with raises(PreconditionFailed, reason=Reason.NOT_JOINED):  # the broken epoch is over
        await played.replica.receive(played.epoch, 31)
    await assert_next_is_exact(played, 32)


async def test_a_sender_that_is_killed_takes_its_store_with_it(played: PlayedTrainer, tmp_path: Path):
    before = await assert_next_is_exact(played, 40)
    epoch, plan_file = played.epoch + 1, tmp_path / "plan"
    plan_file.write_bytes(played.plan.message.SerializeToString())
    command = [sys.executable, str(SILENT_SENDER), str(plan_file), played.run_id, str(epoch), "60"]
    sender = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(lambda: sender.returncode is None and sender.kill())
        port, secret = int(await sender.stdout.readline()), bytes.fromhex((await sender.stdout.readline()).decode())
        message = played.describe_group(epoch, 60)
        message.store_port, message.store_secret = port, secret
        await played.replica.join(message, played.plan.message)
        played.epoch = epoch
        receiving = asyncio.create_task(played.replica.receive(epoch, 41))
        assert await sender.stdout.readline() == b"first bucket sent\n"
        sender.send_signal(signal.SIGKILL)
        with pytest.raises(Aborted) as raised:
            await receiving
    # The connections of the sender break, so nothing has to wait for the 60 s of the group.
    assert "waited" not in raised.value.message
    await sender.wait()
    await assert_serves_nothing(played, before)
    await assert_next_is_exact(played, 42)


async def test_a_member_that_never_comes_costs_the_timeout_and_no_weights(played: PlayedTrainer):
    stamp = await assert_next_is_exact(played, 50)
    played.epoch += 1
    with raises(Aborted):
        await played.replica.join(played.describe_group(played.epoch, 3.0), played.plan.message)
    await played.assert_exact(stamp)  # nothing was received, so the old weights are whole
    with raises(PreconditionFailed, reason=Reason.NOT_JOINED):
        await played.replica.receive(played.epoch, 51)
    await played.assert_exact(stamp)


async def test_old_and_unknown_epochs_are_refused(played: PlayedTrainer):
    stamp = await assert_next_is_exact(played, 60)
    for epoch in (played.epoch, played.epoch - 1):
        with raises(PreconditionFailed, reason=Reason.OLD_EPOCH):
            await played.replica.join(played.describe_group(epoch, 5), played.plan.message)
    with raises(InvalidInput, field="base_rank"):
        await played.replica.join(played.describe_group(played.epoch + 1, 5), played.plan.message, base_rank=0)
    for epoch in (played.epoch - 1, played.epoch + 1):
        with raises(PreconditionFailed, reason=Reason.NOT_JOINED):
            await played.replica.receive(epoch, 61)
    await played.assert_exact(stamp)


async def test_weights_that_change_under_a_sample_abort_it(played: PlayedTrainer):
    before = await assert_next_is_exact(played, 70)
    generating = asyncio.create_task(
        played.replica.generate(before, seeds=range(8), temperature=1.0, max_tokens=480)  # takes seconds
    )
    await played.replica.until_sampling()
    played.draw(seed=71)
    stamp = await played.publish(71)
    with raises(PreconditionFailed, reason=Reason.NOT_SERVING):
        await generating
    assert (await played.replica.info()).samples_in_flight == 0
    await played.assert_exact(stamp)


async def test_a_cached_prefix_does_not_outlive_its_weights(played: PlayedTrainer):
    prompt = [3 + i % 50 for i in range(400)]  # some blocks of the prefix cache
    for version in (80, 81):
        played.draw(seed=version)
        stamp = await played.publish(version)
        for _ in range(2):  # the second time, the prefix comes from the cache
            (answer,) = await played.replica.generate(stamp, [prompt], max_tokens=16)
            assert [list(answer.completions[0].tokens)] == greedy_by_transformers(played.model, 16, [prompt])
