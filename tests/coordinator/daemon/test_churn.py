"""Replaces the replicas of a run every step, through the daemon, as spot instances come and go."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from services.common.errors import InvalidInput, NotFound, PreconditionFailed, Reason
from services.coordinator.runs.record import batch_path
from services.coordinator.runs.replicas import replica_state
from tests.coordinator.daemon.harness import Daemon, daemon, fake_services
from tests.coordinator.fake_services import FakeReplica
from tests.support import raises, until

NUM_STEPS = 8
Log = pytest.LogCaptureFixture


def assert_same_batches(directories: Sequence[Path]) -> None:
    for version in range(NUM_STEPS):
        first, *others = [pq.read_table(batch_path(directory, version)) for directory in directories]
        assert first.num_rows == 4
        assert all(first.equals(other) for other in others)


async def states(here: Daemon, name: str) -> dict[str, str]:
    return {replica.address: replica_state(replica) for replica in await here.coordinator.replicas(name)}


async def replace_in_step(here: Daemon, log: Log, old: FakeReplica, new: FakeReplica, *, is_killed: bool) -> None:
    """Replaces the only replica `old`, which is told to leave or is killed and never comes back."""
    name = "churned"
    await here.coordinator.change_replicas(name, [new.address], [])
    await until(lambda: f"replica {new.address} has come" in log.text)
    if is_killed:
        await old.die()
    await here.coordinator.change_replicas(name, [], [old.address])
    assert await states(here, name) == {old.address: "leaving", new.address: "joining"}


async def test_replacing_replicas_every_step_changes_no_sample(tmp_path: Path, caplog: Log) -> None:
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(daemon(tmp_path))
        calm, churned = [await stack.enter_async_context(fake_services()) for _ in range(2)]
        await here.run(calm, name="calm", num_steps=NUM_STEPS)
        assert (await here.watched("calm"))[-1].run.version == NUM_STEPS

        churned.trainer.hold_after(0)
        await here.run(churned, name="churned", num_steps=NUM_STEPS)
        used = [churned.replica]
        for step in range(NUM_STEPS):
            await churned.trainer.training.wait()  # the samples of the step are drawn
            new = FakeReplica()
            await new.start()
            stack.push_async_callback(new.die)
            await replace_in_step(here, caplog, used[-1], new, is_killed=step % 2 == 1)
            used.append(new)
            churned.trainer.training.clear()
            churned.trainer.permits.release()
        last = (await here.watched("churned"))[-1].run
        assert (last.version, last.error) == (NUM_STEPS, "")
        assert_same_batches([tmp_path / "runs" / name for name in ("calm", "churned")])
        # Each drew one step, and the last one, which joined after it, was only published to.
        assert [len(replica.answered) for replica in used] == [2] * NUM_STEPS + [0]
        assert [[stamp.version for stamp in replica.committed] for replica in used] == [
            [v] for v in range(NUM_STEPS + 1)
        ]
        assert all(replica.closed for replica in used[0::2])


async def test_what_cannot_be_changed_is_refused(tmp_path: Path) -> None:
    async with daemon(tmp_path) as here, fake_services() as fakes:
        fakes.trainer.hold_after(0)
        await here.run(fakes)
        await fakes.trainer.training.wait()
        only = fakes.replica.address
        for add, remove, field in (
            (["10.0.0.1:1"], [], "add"),
            ([], [only], "address"),
            ([], ["127.0.0.1:1"], "address"),
        ):
            with raises(InvalidInput, field=field):
                await here.coordinator.change_replicas("run", add, remove)
        assert await states(here, "run") == {only: "serving"}
        fakes.trainer.let_go()
        await here.watched()
        with raises(PreconditionFailed, reason=Reason.WRONG_STATE):
            await here.coordinator.change_replicas("run", [only], [])
        with raises(NotFound, field="name"):
            await here.coordinator.replicas("walk")
