"""Batches of earlier weights, asked of a real trainer of two ranks over gRPC."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.errors import PreconditionFailed, Reason
from tests.trainer.deployment import Deployment
from tests.trainer.harness_processes import marked

# The samples' log-probabilities are made up, so that their effective sample size is small.
_LAGGED: dict[str, Any] = {"lag": {"versions": 1, "min_ess": 1e-6}, "loss": {"old_logprobs": "engine"}}
BACKENDS: dict[str, dict[str, Any]] = {
    "FSDP": _LAGGED,
    "Megatron": {**_LAGGED, "strategy": "megatron", "num_ranks": 2},
    "Megatron, tensors cut": {
        **_LAGGED,
        "strategy": "megatron",
        "num_ranks": 2,
        "megatron": {"tensor_model_parallel_size": 2},
    },
}
_NUM_STEPS, _SAVED = 4, 2


async def refused(trainer: Deployment, batch: pa.Table, drawn: PolicyStamp | None) -> Reason:
    """Returns why a batch whose header names `drawn` was refused, after comparing the weights with those before."""
    before = trainer.stamp
    with pytest.raises(PreconditionFailed) as caught:
        await trainer.train(batch, drawn_stamp=drawn)
    assert await trainer.publish() == before
    return caught.value.reason


@pytest.mark.parametrize("backend", marked(BACKENDS, ["Megatron"]))
async def test_a_resumed_trainer_knows_its_last_publication(
    deployment: Deployment, tmp_path: Path, backend: str
) -> None:
    path = str(tmp_path / "checkpoint")
    await deployment.open(**BACKENDS[backend])
    stamps = [await deployment.publish()]

    async def step(number: int) -> PolicyStamp:
        drawn = stamps[max(0, number - 1)]
        await deployment.train(deployment.batch(drawn, seed=number), drawn_stamp=drawn)
        return await deployment.publish()

    for number in range(_NUM_STEPS):
        if number == _SAVED:
            await deployment.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=path))
        stamps.append(await step(number))
    assert len({stamp.digest for stamp in stamps}) == _NUM_STEPS + 1

    await deployment.open(checkpoint=path, **BACKENDS[backend])
    assert await deployment.publish() == stamps[_SAVED]
    older, drawn, newest = stamps[: _SAVED + 1]
    other = PolicyStamp(version=drawn.version, digest=older.digest)
    assert await refused(deployment, deployment.batch(older), older) is Reason.TOO_STALE
    assert await refused(deployment, deployment.batch(other), other) is Reason.DIGEST_MISMATCH
    assert await refused(deployment, deployment.batch(newest), drawn) is Reason.FUTURE_STAMP
    assert await refused(deployment, deployment.batch(drawn), newest) is Reason.STALE_STAMP
    assert await refused(deployment, deployment.batch(drawn), None) is Reason.STALE_STAMP
    assert [await step(number) for number in range(_SAVED, _NUM_STEPS)] == stamps[_SAVED + 1 :]
