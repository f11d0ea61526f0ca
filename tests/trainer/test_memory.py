"""Tests ReleaseMemory and AcquireMemory of a real trainer of two ranks, on both backends.

Runs that use them are equal to the last bit to runs that do not.
"""

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService

from services.common.config.trainer import CriticSettings
from services.common.errors import InvalidInput, LockstepError, PreconditionFailed, Reason
from services.common.rpc.fence import new_token
from tests.support import raises
from tests.trainer.critic_harness import with_returns
from tests.trainer.deployment import Deployment
from tests.trainer.fsdp_harness import config
from tests.trainer.harness_processes import marked

OPTIMIZER, PARAMETERS = pb.MODEL_PART_OPTIMIZER, pb.MODEL_PART_PARAMETERS
BOTH = (OPTIMIZER, PARAMETERS)
POLICY, REFERENCE, CRITIC = pb.ROLE_POLICY, pb.ROLE_REFERENCE, pb.ROLE_CRITIC
KL = {"loss": {"kl_coef": 0.1}}
LORA = {"rank": 4, "alpha": 8.0}
BF16 = {"compute_dtype": "bfloat16"}


def megatron(**settings: Any) -> dict[str, Any]:
    return {"strategy": "megatron", "num_ranks": 2, "megatron": settings}


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": KL,
    "fsdp-bf16": BF16,
    "megatron": megatron() | KL | BF16,  # float32 weights and moments sharded over the two ranks
    "megatron-float32": megatron(),  # the model's weights are the optimizer's too
    "megatron-plain": megatron(use_distributed_optimizer=False) | BF16,
    "megatron-offloads": megatron(auto_offload=True) | KL | BF16,
    "megatron-lora": megatron(tensor_model_parallel_size=2) | KL | BF16 | {"lora": LORA},
}


async def release(trainer: Deployment, *parts: int, roles: tuple[int, ...] = ()) -> pb.ReleaseMemoryResponse:
    return await trainer.call(TrainerService.ReleaseMemory, pb.ReleaseMemoryRequest(parts=parts, roles=roles))


async def acquire(trainer: Deployment, *parts: int, roles: tuple[int, ...] = ()) -> pb.AcquireMemoryResponse:
    return await trainer.call(TrainerService.AcquireMemory, pb.AcquireMemoryRequest(parts=parts, roles=roles))


async def refused(call: Awaitable[object], reason: Reason = Reason.MEMORY_RELEASED) -> str:
    with pytest.raises(LockstepError) as raised:
        await call
    assert raised.value.reason is reason, raised.value.message
    return raised.value.message


def batch_of(trainer: Deployment, seed: int = 0) -> pa.Table:
    """Returns a batch with log-probabilities of a reference, which a loss with a KL term needs."""
    table = trainer.batch(seed=seed)
    index = table.schema.get_field_index("ref_logprobs")
    return table.set_column(index, table.schema.field(index), table["logprobs"])


async def open_all(trainer: Deployment, changes: dict[str, Any]) -> None:
    """Opens the policy, a reference if the loss needs one, and a critic."""
    settings = config(changes)
    await trainer.open(**{**changes, "loss": {}}) if settings.lora.rank else await trainer.open(**changes)
    await trainer.open_role(CRITIC, CriticSettings.model_validate(config({**changes, "lora": {}}).model_dump()))


async def steps(trainer: Deployment, changes: dict[str, Any], *, moves: bool) -> list[Any]:
    """Makes two steps in the order of a colocated run; returns all that the trainer answers and publishes."""
    await open_all(trainer, changes)
    said: list[Any] = [await trainer.publish()]
    if moves:
        await release(trainer, *BOTH)
    for step in range(2):
        if moves:
            await acquire(trainer, *BOTH)
        batch = batch_of(trainer, step)
        roles = [POLICY, CRITIC, *([REFERENCE] if "loss" in changes else [])]
        said += [(await trainer.forward(batch, role)).to_pylist() for role in roles]
        critic = await trainer.train(with_returns(batch), role=CRITIC, critic_version=step)
        said += [numbers(critic.metrics), numbers((await trainer.train(batch)).metrics)]
        if moves:
            await release(trainer, OPTIMIZER)  # a publication needs the parameters only
        said.append(await trainer.publish())
        if moves:
            await release(trainer, PARAMETERS)
    if moves:
        await acquire(trainer, *BOTH)
    return said


def numbers(metrics: Any) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


@pytest.mark.parametrize("name", marked(LAYOUTS, ["fsdp-bf16", "megatron-float32", "megatron-plain"]))
async def test_a_run_that_releases_its_memory_is_equal_to_one_that_does_not(deployment: Deployment, name: str):
    kept = await steps(deployment, LAYOUTS[name], moves=False)
    moved = await steps(deployment, LAYOUTS[name], moves=True)
    assert len(kept) == len(moved)
    for index, (want, got) in enumerate(zip(kept, moved, strict=True)):
        assert got == want, index
    assert len({stamp.digest for stamp in moved if hasattr(stamp, "digest")}) == 3  # it does train


@pytest.mark.parametrize("name", ["fsdp", "megatron"])
async def test_the_answers_have_what_left_and_came(deployment: Deployment, name: str):
    await deployment.open(**LAYOUTS[name])
    await deployment.publish()
    await deployment.train(batch_of(deployment))
    first = (await release(deployment, OPTIMIZER)).ranks
    second = (await release(deployment, PARAMETERS, roles=(POLICY,))).ranks
    third = (await release(deployment, *BOTH)).ranks
    assert len(first) == len(second) == len(third) == 2
    for one, two, three in zip(first, second, third, strict=True):
        assert min(one.freed_bytes, two.freed_bytes, three.freed_bytes) > 0  # the reference was left for the third
        assert one.resident_bytes - two.resident_bytes == two.freed_bytes
        assert three.resident_bytes == 0 and three.freed_bytes == two.resident_bytes
        assert 0 < one.host_bytes < two.host_bytes < three.host_bytes
        assert (one.device_uuid, one.device_total_bytes, one.taken_bytes) == ("", 0, 0)
        assert one.duration_s > 0
    again = (await release(deployment, *BOTH)).ranks
    assert [(rank.freed_bytes, rank.taken_bytes) for rank in again] == [(0, 0)] * 2
    taken = (await acquire(deployment, *BOTH)).ranks
    everything = [sum(call[rank].freed_bytes for call in (first, second, third)) for rank in (0, 1)]
    assert [rank.taken_bytes for rank in taken] == everything
    again = (await acquire(deployment, *BOTH)).ranks
    assert [(rank.freed_bytes, rank.taken_bytes) for rank in again] == [(0, 0)] * 2


async def test_calls_that_need_a_released_part_are_refused(deployment: Deployment, tmp_path: Path):
    await deployment.open(**KL)
    await deployment.publish()
    stamp = await deployment.current_stamp()
    batch = batch_of(deployment)
    checkpoint = pb.SaveCheckpointRequest(path=str(tmp_path / "checkpoint"))
    await release(deployment, OPTIMIZER)
    assert "optimizer" in await refused(deployment.train(batch))
    await refused(deployment.call(TrainerService.SaveCheckpoint, checkpoint))
    assert not list(tmp_path.iterdir())
    await deployment.forward(batch)
    assert await deployment.publish() == stamp  # needs the parameters only

    await release(deployment, PARAMETERS, roles=(POLICY,))
    assert "parameters" in await refused(deployment.forward(batch))
    await refused(deployment.publish())
    export = pb.ExportHuggingFaceRequest(path=str(tmp_path / "export"))
    await refused(deployment.call(TrainerService.ExportHuggingFace, export))
    assert not list(tmp_path.iterdir())
    await deployment.forward(batch, REFERENCE)  # which was not released
    await release(deployment, PARAMETERS)
    await refused(deployment.forward(batch, REFERENCE))

    await acquire(deployment, PARAMETERS, roles=(REFERENCE,))
    await deployment.forward(batch, REFERENCE)
    await refused(deployment.forward(batch))
    await acquire(deployment, *BOTH)
    assert await deployment.current_stamp() == stamp
    assert (await deployment.train(batch)).version == 1
    await deployment.call(TrainerService.SaveCheckpoint, checkpoint)


async def test_a_batch_that_was_applied_is_answered_without_the_memory(trainer: Deployment):
    """Tests the call of a resumed coordinator, which does not know what was released."""
    batch = trainer.batch()
    await trainer.train(batch, batch_id="once")
    await release(trainer, *BOTH)
    assert (await trainer.train(batch, batch_id="once")).replayed


@pytest.mark.parametrize("parts", [(), (pb.MODEL_PART_UNSPECIFIED,), (PARAMETERS, 9)])
async def test_parts_are_named(trainer: Deployment, parts: tuple[int, ...]):
    for call in (release, acquire):
        with raises(InvalidInput, field="parts"):
            await call(trainer, *parts)


async def test_roles_must_be_open(trainer: Deployment):
    with raises(InvalidInput, field="roles"):
        await release(trainer, PARAMETERS, roles=(CRITIC,))


async def test_a_role_that_is_opened_anew_is_on_the_devices(trainer: Deployment):
    await release(trainer, *BOTH)
    await trainer.open()
    await trainer.publish()
    await trainer.train(trainer.batch())


async def test_only_the_runs_coordinator_moves_memory(trainer: Deployment):
    with new_token():
        for call in (release, acquire):
            with raises(PreconditionFailed, reason=Reason.RUN_REPLACED):
                await call(trainer, *BOTH)
    await trainer.forward(trainer.batch())
