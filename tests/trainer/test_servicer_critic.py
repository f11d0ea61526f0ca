"""Tests the critic beside the policy on a real trainer of two ranks over gRPC."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.config.trainer import CriticSettings
from services.common.errors import InvalidInput, LockstepError, PreconditionFailed, Reason
from tests.trainer.critic_harness import with_returns
from tests.trainer.deployment import Deployment
from tests.trainer.fsdp_harness import config

SETTINGS = CriticSettings.model_validate(config().model_dump())
CRITIC = {"role": pb.ROLE_CRITIC}
_numbers = itertools.count()


@pytest.fixture
async def both(trainer: Deployment) -> Deployment:
    """Provides a trainer with a policy, whose weights are published, and a critic."""
    await trainer.open_role(pb.ROLE_CRITIC, SETTINGS)
    return trainer


async def said(trainer: Deployment) -> np.ndarray:
    rows = (await trainer.forward(trainer.batch(), pb.ROLE_CRITIC))["values"].to_pylist()
    return np.concatenate(rows)


def batch_of(trainer: Deployment, stamp: PolicyStamp | None = None) -> pa.Table:
    return with_returns(trainer.batch(stamp))


async def refused(call: Any) -> LockstepError:
    with pytest.raises(LockstepError) as caught:
        await call
    return caught.value


async def test_service_trains_the_critic_beside_the_policy(both: Deployment) -> None:
    table = await both.forward(both.batch(), pb.ROLE_CRITIC)
    assert table.column_names == ["values"]
    assert [len(row) for row in table["values"]] == [len(row) for row in both.batch()["tokens"]]
    assert not (await said(both)).any()
    stamp = await both.current_stamp()
    answer = await both.train(batch_of(both), **CRITIC)
    assert answer.version == 1
    assert {"critic_loss", "critic_explained_variance", "critic_grad_norm"} <= set(answer.metrics)
    assert await both.current_stamp() == stamp  # the policy is what it was, and published
    assert (await both.train(batch_of(both))).version == 1
    # The critic is trained on a batch that the policy has been trained on already.
    again = await both.train(batch_of(both), **CRITIC, critic_version=1)
    assert again.version == 2
    assert await both.publish() != stamp


async def test_service_applies_a_batch_to_the_critic_once(both: Deployment) -> None:
    first = await both.train(batch_of(both), **CRITIC, batch_id="once")
    values = await said(both)
    again = await both.train(batch_of(both), **CRITIC, batch_id="once")
    assert (again.version, again.replayed, dict(again.metrics)) == (1, True, dict(first.metrics))
    error = await refused(both.train(batch_of(both), **CRITIC, batch_id="once", critic_version=1))
    assert (type(error), error.reason) == (PreconditionFailed, Reason.REPLAYED_BATCH)
    assert np.array_equal(await said(both), values)
    # The policy has batches of its own.
    assert not (await both.train(batch_of(both), batch_id="once")).replayed


async def test_service_refuses_a_batch_that_is_not_for_the_critic(both: Deployment) -> None:
    other = PolicyStamp(version=7, digest="f" * 32)
    mixed = pa.concat_tables([batch_of(both).slice(0, 11), batch_of(both, other).slice(11)])
    error = await refused(both.train(mixed, **CRITIC))
    assert (type(error), error.reason) == (PreconditionFailed, Reason.FUTURE_STAMP)
    for version in (1, 5):
        error = await refused(both.train(batch_of(both), **CRITIC, critic_version=version))
        assert (type(error), error.reason) == (PreconditionFailed, Reason.STALE_STAMP)
        assert f"version {version}" in error.message
    for name in ("values", "returns"):
        index = mixed.schema.get_field_index(name)
        nulls = pa.nulls(12, mixed.schema.field(index).type)
        table = batch_of(both).set_column(index, mixed.schema.field(index), nulls)
        error = await refused(both.train(table, **CRITIC))
        assert (type(error), error.metadata["field"]) == (InvalidInput, name)
    assert not (await said(both)).any()


async def test_service_names_the_role_that_is_not_open(trainer: Deployment, tmp_path: Path) -> None:
    for call in (
        trainer.forward(trainer.batch(), pb.ROLE_CRITIC),
        trainer.train(batch_of(trainer), **CRITIC),
        trainer.call(
            TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(tmp_path / "c"), role=pb.ROLE_CRITIC)
        ),
    ):
        error = await refused(call)
        assert (type(error), error.metadata["field"]) == (InvalidInput, "role")
        assert "critic" in error.message


async def test_service_saves_and_resumes_the_critic(both: Deployment, tmp_path: Path) -> None:
    await both.train(batch_of(both), **CRITIC, batch_id="b1")
    values, paths = await said(both), {role: tmp_path / str(role) for role in (pb.ROLE_POLICY, pb.ROLE_CRITIC)}
    for role, path in paths.items():
        await both.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(path), role=role))
    other = SETTINGS.model_copy(update={"num_minibatches": 2})  # opened anew, not found open
    opened = await both.open_role(pb.ROLE_CRITIC, other, checkpoint=str(paths[pb.ROLE_CRITIC]))
    assert (opened.version, opened.last_batch_id) == (1, "b1")
    assert np.array_equal(await said(both), values)
    error = await refused(both.open_role(pb.ROLE_CRITIC, SETTINGS, checkpoint=str(paths[pb.ROLE_POLICY])))
    assert (type(error), "role" in error.message) == (PreconditionFailed, True)
    assert isinstance(await refused(said(both)), InvalidInput)
    # Nothing of that concerns the policy.
    assert await both.publish() == both.stamp
    assert (await both.train(batch_of(both))).version == 1


async def test_service_closes_all_roles_with_the_run(both: Deployment) -> None:
    await both.open_role(pb.ROLE_CRITIC, SETTINGS)  # the same again: it is open
    await both.train(batch_of(both), **CRITIC)
    again = await both.open_role(pb.ROLE_CRITIC, SETTINGS)
    assert again.version == 1
    await both.open_role(pb.ROLE_POLICY, config({"num_minibatches": 2}))
    assert isinstance(await refused(said(both)), InvalidInput)
    both.run_id = f"other{next(_numbers)}"
    await both.open_role(pb.ROLE_CRITIC, SETTINGS)
    assert not (await said(both)).any()
    error = await refused(both.forward(both.batch()))
    assert (type(error), error.metadata["field"]) == (InvalidInput, "role")
    await both.call(TrainerService.CloseRun, pb.CloseRunRequest(run_id=both.run_id))
    assert (await refused(said(both))).reason is Reason.RUN_NOT_OPEN


async def test_service_trains_no_reference_and_knows_no_other_role(trainer: Deployment, tmp_path: Path) -> None:
    await trainer.open_role(pb.ROLE_REFERENCE, config())
    for role in (pb.ROLE_REFERENCE, 9):
        for call in (
            trainer.train(trainer.batch(), role=role),
            trainer.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(tmp_path / "r"), role=role)),
        ):
            error = await refused(call)
            assert (type(error), error.metadata["field"]) == (InvalidInput, "role")
    assert await trainer.current_stamp() == trainer.stamp
