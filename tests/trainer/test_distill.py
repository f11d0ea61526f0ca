"""Tests an update of on-policy distillation against plain torch: the gradient of the reverse KL to a teacher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.common.batches import decode_top_k, encode_top_k
from services.common.config.advantage import AdvantageConfig
from services.common.errors import InvalidInput
from services.coordinator.rl.advantages import compute_advantages
from tests.support import VOCAB, raises, with_teacher_top_k
from tests.trainer import plain_grpo
from tests.trainer.deployment import Deployment
from tests.trainer.fsdp_harness import config

COEF = 0.7
# As for every update that is compared with float64 (fsdp/test_backend.py): Adam makes the weights from quotients of
# gradients that are rounded to float32.
TOLERANCE = 2e-5


def with_column(batch: pa.Table, column: str, values: Any) -> pa.Table:
    index = batch.schema.get_field_index(column)
    return batch.set_column(index, batch.schema.field(index), values)


def with_logprobs(batch: pa.Table, column: str, scored: pa.Table) -> pa.Table:
    return with_column(batch, column, scored["logprobs"])


def plain_update(
    models: Path, batch: pa.Table, mistake: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Returns the weights after one update of the policy `untied` toward the teacher `tied`, in float64.

    The advantage of each token is coef * (log teacher - log policy), or what `mistake` makes of the two.
    """
    policy, teacher = (
        AutoModelForCausalLM.from_pretrained(models / kind, dtype=torch.float64) for kind in ("untied", "tied")
    )
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows:
        with torch.no_grad():
            policy_T, teacher_T = (plain_grpo.score(model, row, 1.0)[0] for model in (policy, teacher))
        toward_T = mistake(policy_T, teacher_T) if mistake else teacher_T - policy_T
        row |= {"advantages": (COEF * toward_T).tolist(), "logprobs": policy_T.tolist()}
    return plain_grpo.update(models / "untied", rows, config({}), 1.0).weights


def gap(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of a weight, relative to the largest weight of its tensor."""
    assert got.keys() == want.keys()
    return max(float((got[n].double() - t).abs().max() / t.abs().max()) for n, t in want.items())


async def test_an_update_is_that_of_plain_torch(trainer: Deployment, tmp_path: Path) -> None:
    await trainer.open_role(pb.ROLE_TEACHER, config({}), "tied")
    batch = trainer.batch()
    batch = with_logprobs(batch, "logprobs", await trainer.forward(batch))
    batch = with_logprobs(batch, "teacher_logprobs", await trainer.forward(batch, role=pb.ROLE_TEACHER))
    batch = compute_advantages(batch, AdvantageConfig(kind="distill", distill_coef=COEF))
    await trainer.train(batch)
    path = tmp_path / "trained"
    await trainer.call(TrainerService.ExportHuggingFace, pb.ExportHuggingFaceRequest(path=str(path)))
    got = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    want = plain_update(trainer.models, batch)
    assert gap(got, want) < TOLERANCE
    # The comparison notices the usual mistakes, as far as they are from rounding.
    mistakes: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "the sign of the KL": lambda policy_T, teacher_T: policy_T - teacher_T,
        "the teacher is off by one token": lambda policy_T, teacher_T: teacher_T.roll(1) - policy_T,
        "the teacher alone": lambda policy_T, teacher_T: teacher_T,
    }
    for name, mistake in mistakes.items():
        assert gap(plain_update(trainer.models, batch, mistake), want) > 100 * TOLERANCE, name


DISTILL = {"coef": COEF, "top_k": 12}


def plain_top_k_update(models: Path, batch: pa.Table, kl: str, shift: int = 0, k: int = 12) -> dict[str, torch.Tensor]:
    """Returns the weights after an update that descends only the divergence from the teacher's top k, in float64.

    With `shift`, the teacher is off by so many tokens.
    """
    teacher = AutoModelForCausalLM.from_pretrained(models / "tied", dtype=torch.float64)
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows:
        with torch.no_grad():
            whole = plain_grpo.distributions(teacher, row, 1.0).roll(shift, 0)
            probs, tokens = whole.topk(k)
            probs = torch.cat([probs, whole.scatter(1, tokens, 0).sum(1, keepdim=True)], 1)
        row |= {"teacher_top_k": encode_top_k(tokens.numpy(), probs.log().numpy())}
    settings = config({"loss": {"distill": DISTILL | {"kl": kl}}})
    return plain_grpo.update(models / "untied", rows, settings, 1.0).weights


@pytest.mark.parametrize("kl", ["reverse", "forward"])
async def test_an_update_toward_the_top_k_is_that_of_plain_torch(trainer: Deployment, tmp_path: Path, kl: str) -> None:
    await trainer.open(loss={"distill": DISTILL | {"kl": kl}})
    await trainer.publish()
    await trainer.open_role(pb.ROLE_TEACHER, config({}), "tied")
    batch = trainer.batch()
    batch = with_logprobs(batch, "logprobs", await trainer.forward(batch))
    answer = await trainer.forward(batch, role=pb.ROLE_TEACHER, top_k=12)
    batch = with_column(batch, "teacher_top_k", answer["top_k"])
    batch = with_logprobs(batch, "teacher_logprobs", answer)
    batch = compute_advantages(batch, AdvantageConfig(kind="distill", distill_coef=0))
    metrics = (await trainer.train(batch)).metrics
    path = tmp_path / "trained"
    await trainer.call(TrainerService.ExportHuggingFace, pb.ExportHuggingFaceRequest(path=str(path)))
    got = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert gap(got, plain_top_k_update(trainer.models, batch, kl)) < TOLERANCE
    assert metrics["loss"] == pytest.approx(COEF * metrics["distill_kl"], rel=1e-6)
    other = {"reverse": "forward", "forward": "reverse"}[kl]
    mistakes = {
        "the other divergence": plain_top_k_update(trainer.models, batch, other),
        "the teacher is off by one token": plain_top_k_update(trainer.models, batch, kl, shift=1),
        "fewer tokens": plain_top_k_update(trainer.models, batch, kl, k=4),
    }
    for name, mistaken in mistakes.items():
        assert gap(got, mistaken) > 100 * TOLERANCE, name


async def test_tokens_of_a_teacher_are_checked(trainer: Deployment) -> None:
    await trainer.open(loss={"distill": DISTILL})
    await trainer.publish()
    with raises(InvalidInput, field="teacher_top_k"):  # the loss needs them
        await trainer.train(trainer.batch())
    with raises(InvalidInput, field="top_k"):
        await trainer.forward(trainer.batch(), top_k=VOCAB + 1)
    sound = with_teacher_top_k(trainer.batch())
    first, *rest = sound["teacher_top_k"].to_pylist()
    tokens_TK, logprobs_TK = decode_top_k(first, len(sound["tokens"][0]))
    twice, outside, likely = tokens_TK.copy(), tokens_TK.copy(), logprobs_TK.copy()
    twice[-1, 1], outside[0, 0], likely[0] = twice[-1, 0], VOCAB, -0.1
    wrong = [
        first[:-8],
        encode_top_k(tokens_TK[:, :5], logprobs_TK[:, :6]),
        *(encode_top_k(tokens, logprobs_TK) for tokens in (twice, outside, tokens_TK - 2)),
        *(encode_top_k(tokens_TK, logprobs) for logprobs in (likely, logprobs_TK + np.inf)),
        None,
    ]
    for row in wrong:
        with raises(InvalidInput, field="teacher_top_k"):
            await trainer.train(with_column(sound, "teacher_top_k", pa.array([row, *rest], pa.large_binary())))
    await trainer.train(sound)


async def test_a_teacher_is_frozen_and_its_column_is_checked(trainer: Deployment) -> None:
    batch = trainer.batch()
    with raises(InvalidInput, field="role"):
        await trainer.forward(batch, role=pb.ROLE_TEACHER)
    await trainer.open_role(pb.ROLE_TEACHER, config({}), "tied")
    with raises(InvalidInput, field="role"):
        await trainer.train(batch, role=pb.ROLE_TEACHER)
    index = batch.schema.get_field_index("teacher_logprobs")
    field = batch.schema.field(index)
    short = [row[:-1] for row in batch["logprobs"].to_pylist()]
    likely = [[0.5 for _ in row] for row in batch["logprobs"].to_pylist()]
    for wrong in (short, likely):
        with raises(InvalidInput, field="teacher_logprobs"):
            await trainer.train(batch.set_column(index, field, pa.array(wrong, field.type)))


@pytest.mark.parametrize("part", [pb.MODEL_PART_OPTIMIZER, pb.MODEL_PART_PARAMETERS])
async def test_a_teacher_gives_its_memory_back_and_is_the_same_again(trainer: Deployment, part: pb.ModelPart) -> None:
    await trainer.open_role(pb.ROLE_TEACHER, config({}), "tied")
    batch = trainer.batch()
    before = await trainer.forward(batch, role=pb.ROLE_TEACHER)
    for method, request in (
        (TrainerService.ReleaseMemory, pb.ReleaseMemoryRequest(parts=[part], roles=[pb.ROLE_TEACHER])),
        (TrainerService.AcquireMemory, pb.AcquireMemoryRequest(parts=[part], roles=[pb.ROLE_TEACHER])),
    ):
        await trainer.call(method, request)
    assert (await trainer.forward(batch, role=pb.ROLE_TEACHER)).equals(before)
