"""Tests the on-policy contract of a real trainer of two ranks over gRPC."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp
from transformers import AutoModelForCausalLM

from services.common import batches
from services.common.batches import content_sha256
from services.common.errors import Aborted, InvalidInput, LockstepError, PreconditionFailed, Reason
from tests.support import raises
from tests.trainer import plain_grpo
from tests.trainer.deployment import Deployment, as_stream, block_messages

OTHER_DIGEST = "f" * 32


def changed(table: pa.Table, column: str, values: list[Any]) -> pa.Table:
    index = table.schema.get_field_index(column)
    field = table.schema.field(index)
    return table.set_column(index, field, pa.array(values, field.type))


def with_row(table: pa.Table, column: str, row: int, value: Any) -> pa.Table:
    values = table[column].to_pylist()
    values[row] = value
    return changed(table, column, values)


def with_rows(table: pa.Table, row: int, **values: Any) -> pa.Table:
    for column, value in values.items():
        table = with_row(table, column, row, value)
    return table


async def refused(trainer: Deployment, batch: pa.Table, **header: Any) -> LockstepError:
    """Returns the error of Train; asserts that nothing was applied: version and content are what they were."""
    before = trainer.stamp
    with pytest.raises(LockstepError) as caught:
        await trainer.train(batch, **header)
    assert await trainer.current_stamp() == before
    assert await trainer.publish() == before
    return caught.value


def stale(stamp: PolicyStamp) -> PolicyStamp:
    return PolicyStamp(version=stamp.version - 1, digest=stamp.digest)


def future(stamp: PolicyStamp) -> PolicyStamp:
    return PolicyStamp(version=stamp.version + 1, digest=stamp.digest)


def of_other_content(stamp: PolicyStamp) -> PolicyStamp:
    return PolicyStamp(version=stamp.version, digest=OTHER_DIGEST)


WRONG_STAMPS = pytest.mark.parametrize(
    ("wrong", "reason"),
    [(stale, Reason.STALE_STAMP), (future, Reason.FUTURE_STAMP), (of_other_content, Reason.DIGEST_MISMATCH)],
)


async def at_version_one(trainer: Deployment) -> None:
    await trainer.train(trainer.batch())
    await trainer.publish()


@WRONG_STAMPS
async def test_batch_of_another_stamp_is_refused(
    trainer: Deployment, wrong: Callable[[PolicyStamp], PolicyStamp], reason: Reason
) -> None:
    await at_version_one(trainer)
    stamp = wrong(trainer.stamp)
    error = await refused(trainer, trainer.batch(stamp), stamp=stamp)
    assert (type(error), error.reason) == (PreconditionFailed, reason)
    assert error.metadata["held_version"] == "1"
    assert error.metadata["expected_digest"] == stamp.digest


@WRONG_STAMPS
async def test_one_sample_of_another_stamp_is_refused(
    trainer: Deployment, wrong: Callable[[PolicyStamp], PolicyStamp], reason: Reason
) -> None:
    await at_version_one(trainer)
    stamp = wrong(trainer.stamp)
    for row in (0, 7, 11):
        batch = with_row(trainer.batch(), "policy_version", row, stamp.version)
        batch = with_row(batch, "policy_digest", row, stamp.digest)
        error = await refused(trainer, batch)
        assert (type(error), error.reason) == (PreconditionFailed, reason)
        assert "sample" in error.message


async def test_batch_of_unpublished_weights_is_refused(trainer: Deployment) -> None:
    published = trainer.stamp
    await trainer.train(trainer.batch())
    before = await trainer.current_stamp()
    assert (before.version, before.digest) == (1, "")
    for stamp in (published, PolicyStamp(version=1, digest=published.digest)):
        with raises(PreconditionFailed, reason=Reason.UNPUBLISHED):
            await trainer.train(trainer.batch(stamp), stamp=stamp)
    assert await trainer.current_stamp() == before


async def test_header_without_a_stamp_is_refused(trainer: Deployment) -> None:
    error = await refused(trainer, trainer.batch(), stamp=PolicyStamp(version=0))
    assert (type(error), error.metadata["field"]) == (InvalidInput, "expected_stamp")


async def test_right_batch_is_applied_and_changes_the_digest(trainer: Deployment) -> None:
    first = trainer.stamp
    answer = await trainer.train(trainer.batch())
    assert (answer.version, answer.replayed) == (1, False)
    assert answer.metrics["grad_norm"] > 0
    second = await trainer.publish()
    assert (first.version, second.version) == (0, 1)
    assert first.digest != second.digest
    # The content decides, not the moment: publishing again gives the same stamp.
    assert await trainer.publish() == second


async def test_digest_of_the_first_weights_is_that_of_the_model_directory(trainer: Deployment) -> None:
    first = trainer.stamp
    await trainer.open()
    assert await trainer.publish() == first
    await trainer.open("tied")
    assert await trainer.publish() != first


async def test_same_batch_twice_is_applied_once(trainer: Deployment) -> None:
    stamp, batch = trainer.stamp, trainer.batch()
    first = await trainer.train(batch, batch_id="twice")
    again = await trainer.train(batch, batch_id="twice", stamp=stamp)
    assert (first.replayed, again.replayed) == (False, True)
    assert (again.version, dict(again.metrics)) == (first.version, dict(first.metrics))
    applied_once = await trainer.publish()
    # It is replayed after the publication, too, when another batch of the old stamp would be stale.
    assert (await trainer.train(batch, batch_id="twice", stamp=stamp)).replayed
    assert await trainer.publish() == applied_once


async def test_batch_id_cannot_name_another_batch(trainer: Deployment) -> None:
    await trainer.train(trainer.batch(), batch_id="b")
    await trainer.publish()
    error = await refused(trainer, trainer.batch(), batch_id="b")
    assert (type(error), error.reason) == (PreconditionFailed, Reason.REPLAYED_BATCH)


async def test_logprob_diff_is_refused_and_the_trainer_goes_on(deployment: Deployment) -> None:
    await deployment.open(max_logprob_diff=2.0)
    await deployment.publish()
    batch = deployment.batch()
    off = changed(batch, "logprobs", [[-60.0] * len(row) for row in batch["tokens"].to_pylist()])
    error = await refused(deployment, off)
    assert (type(error), error.reason) == (PreconditionFailed, Reason.LOGPROB_DIFF)
    # The difference is about 60 less the random model's 5.
    assert 50 < float(error.metadata["logprob_diff_mean"]) < 60
    assert (await deployment.train(batch)).version == 1


async def test_forward_answers_in_the_order_of_the_samples(deployment: Deployment, trainer_files: Path) -> None:
    await deployment.open(max_tokens_per_microbatch=32)
    batch = deployment.batch()
    scored = await deployment.forward(batch)
    assert (
        (await deployment.forward(pa.concat_tables([batch, batch]))).slice(len(batch)).equals(scored)
    )  # as ranks need it
    model = AutoModelForCausalLM.from_pretrained(trainer_files / "models" / "untied", dtype=torch.float32)
    for row, logprobs, entropy in zip(batch.to_pylist(), *scored.to_pydict().values(), strict=True):
        with torch.no_grad():
            want, want_entropy = plain_grpo.score(model, row, 1.0)
        # Both sides are float32 with logits of size 5, so they differ by a few times 5 x 2^-24.
        np.testing.assert_allclose(logprobs, want.numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(entropy, want_entropy.numpy(), rtol=0, atol=1e-5)


async def test_step_one_is_exactly_on_policy(trainer: Deployment) -> None:
    """Checks that log-probabilities from Forward, as the engine's and the reference's, are those of the update.

    To the last bit there is no difference, no divergence, and a ratio of 1.
    """
    await trainer.open(loss={"kl_coef": 0.1})
    await trainer.publish()
    batch = trainer.batch()
    reference = await trainer.forward(batch, role=pb.ROLE_REFERENCE)
    policy = await trainer.forward(batch)
    assert reference.equals(policy)
    batch = changed(batch, "ref_logprobs", reference["logprobs"].to_pylist())
    batch = changed(batch, "logprobs", policy["logprobs"].to_pylist())
    metrics = (await trainer.train(batch)).metrics
    assert metrics["kl"] == metrics["logprob_diff_max"] == metrics["logprob_diff_kl"] == metrics["clip_fraction"] == 0
    # The mean is a sum of two ranks' shares, which is rounded once.
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1.2e-7)


BAD_BATCHES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "token outside the vocabulary": (lambda b: with_row(b, "tokens", 5, [64] * len(b["tokens"][5])), "tokens"),
    "prompt token outside the vocabulary": (lambda b: with_row(b, "prompt_tokens", 5, [3, 2**31]), "prompt_tokens"),
    "empty completion": (lambda b: with_rows(b, 5, tokens=[], logprobs=[]), "tokens"),
    "empty prompt": (lambda b: with_row(b, "prompt_tokens", 5, []), "prompt_tokens"),
    "missing completion": (lambda b: with_row(b, "tokens", 5, None), "tokens"),
    "missing token": (lambda b: with_row(b, "tokens", 5, [None] * len(b["tokens"][5])), "tokens"),
    "nan logprob": (lambda b: with_row(b, "logprobs", 5, [float("nan")] * len(b["tokens"][5])), "logprobs"),
    "missing logprob": (lambda b: with_row(b, "logprobs", 5, [None] * len(b["tokens"][5])), "logprobs"),
    "infinite advantage": (lambda b: with_row(b, "advantages", 5, [np.inf] * len(b["tokens"][5])), "advantages"),
    "advantage whose gradient overflows": (
        lambda b: with_row(b, "advantages", 5, [1e30] * len(b["tokens"][5])),
        "advantages",
    ),
    "logprob above 0": (lambda b: with_row(b, "logprobs", 5, [0.7] * len(b["tokens"][5])), "logprobs"),
    "nan reward": (lambda b: with_row(b, "reward", 5, float("nan")), "reward"),
    "negative group": (lambda b: with_row(b, "group", 5, -5), "group"),
    "the same sample twice": (lambda b: pa.concat_tables([b, b.slice(5, 1)]), "sample"),
    "missing advantages": (lambda b: with_row(b, "advantages", 5, None), "advantages"),
    "no advantages": (lambda b: changed(b, "advantages", [None] * len(b)), "advantages"),
    "nothing to train on": (lambda b: changed(b, "loss_mask", [[False] * len(t) for t in b["tokens"]]), "loss_mask"),
    "logprobs of another length": (lambda b: with_row(b, "logprobs", 5, [-1.0]), "logprobs"),
    "ref_logprobs of some only": (
        lambda b: with_row(b, "ref_logprobs", 5, [-1.0] * len(b["tokens"][5])),
        "ref_logprobs",
    ),
    "nan ref_logprob": (
        lambda b: changed(b, "ref_logprobs", [[float("nan")] * len(row) for row in b["tokens"].to_pylist()]),
        "ref_logprobs",
    ),
    "longer than a micro-batch": (
        lambda b: with_rows(b, 5, tokens=[2] * 5000, logprobs=[-4.0] * 5000, advantages=[1.0] * 5000),
        "trainer.max_tokens_per_microbatch",
    ),
    "fewer samples than ranks": (lambda b: b.slice(0, 1), "frame"),
    "no sample": (lambda b: b.slice(0, 0), "frame"),
    "a column is missing": (lambda b: b.drop_columns(["advantages"]), "frame"),
}


async def test_bad_samples_are_refused(trainer: Deployment) -> None:
    for case, (spoil, field) in BAD_BATCHES.items():
        batch = spoil(trainer.batch())
        error = await refused(trainer, batch)
        assert (type(error), error.metadata["field"]) == (InvalidInput, field), case
        if field in ("logprobs", "reward", "group"):  # a Forward does not need them either, but they are wrong
            with raises(InvalidInput, field=field):
                await trainer.forward(batch)


async def test_minibatches_that_cannot_be_equal_are_refused(deployment: Deployment) -> None:
    await deployment.open(num_minibatches=3)
    await deployment.publish()
    assert (await refused(deployment, deployment.batch())).metadata["field"] == "trainer.num_minibatches"


async def test_missing_reference_is_refused(deployment: Deployment) -> None:
    await deployment.open(loss={"kl_coef": 0.1})
    await deployment.publish()
    assert (await refused(deployment, deployment.batch())).metadata["field"] == "ref_logprobs"
    await deployment.open()
    with raises(InvalidInput, field="role"):
        await deployment.forward(deployment.batch(), role=pb.ROLE_REFERENCE)


@pytest.mark.parametrize("path", ["tests.no_such_module:loss", "tests.user_functions:no_such"])
async def test_loss_that_cannot_be_imported_is_refused_when_the_run_is_opened(
    deployment: Deployment, path: str
) -> None:
    with raises(InvalidInput, field="trainer.loss.import_path"):
        await deployment.open(loss={"kind": "python", "import_path": path})
    # The same deployment opens the next run, whose loss can be imported, and trains it.
    await deployment.open(loss={"kind": "python", "import_path": "tests.user_functions:soft_clip"})
    await deployment.publish()
    assert (await deployment.train(deployment.batch())).version == 1


async def test_a_loss_that_fails_for_a_later_microbatch_leaves_no_gradients(deployment: Deployment) -> None:
    settings = {
        "loss": {"kind": "python", "import_path": "tests.user_functions:fails_once"},
        "max_tokens_per_microbatch": 32,
    }
    batch, norms = deployment.batch(), []
    for fails in (True, False):
        await deployment.open(**settings)
        await deployment.publish()
        if fails:
            assert (await refused(deployment, batch)).metadata["field"] == "trainer.loss.import_path"
        norms.append((await deployment.train(batch)).metrics["grad_norm"])
    assert norms[0] == norms[1]


async def test_malformed_streams_are_refused(trainer: Deployment) -> None:
    batch = trainer.batch()
    frames = [pb.TrainRequest(frame=frame) for frame in batches.encode(batch)]
    header = pb.TrainRequest(header=pb.TrainHeader(expected_stamp=trainer.stamp, batch_id="b", temperature=1.0))
    block = pb.TrainRequest(block=pb.TrainBlock(sha256=content_sha256(batch)))
    half = pb.TrainRequest(frame=frames[0].frame[: len(frames[0].frame) // 2])
    for requests, field in (
        (frames, "header"),
        ([], "header"),
        ([header, header], "header"),
        ([header, block], "frame"),
        ([header, pb.TrainRequest(frame=b"no arrow"), block], "frame"),
        ([header, half, block], "frame"),
    ):
        with raises(InvalidInput, field=field):
            await trainer.call(TrainerService.Train, as_stream(requests))
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        assert (await refused(trainer, batch, temperature=temperature)).metadata["field"] == "temperature"
    head = pb.TrainHeader(expected_stamp=trainer.stamp, temperature=1.0)
    with raises(InvalidInput, field="batch_id"):
        await trainer.call(TrainerService.Train, as_stream(block_messages(head, batch)))


async def test_epochs_only_grow(trainer: Deployment) -> None:
    epoch = trainer.epoch
    for old in (epoch, epoch - 1):
        with raises(PreconditionFailed, reason=Reason.OLD_EPOCH):
            await trainer.join(epoch=old)
    trainer.epoch = epoch
    assert (await trainer.publish()).digest


async def test_sending_needs_the_joined_epoch_and_the_held_version(trainer: Deployment) -> None:
    for epoch, version, reason in (
        (trainer.epoch + 1, 0, Reason.NOT_JOINED),
        (trainer.epoch - 1, 0, Reason.NOT_JOINED),
        (trainer.epoch, 1, Reason.STALE_STAMP),
    ):
        with pytest.raises(PreconditionFailed) as caught:
            await trainer.call(TrainerService.SendWeights, pb.SendWeightsRequest(epoch=epoch, version=version))
        assert caught.value.reason is reason
    await trainer.open()
    with raises(PreconditionFailed, reason=Reason.NOT_JOINED):
        await trainer.call(TrainerService.SendWeights, pb.SendWeightsRequest(epoch=trainer.epoch, version=0))


async def test_absent_member_aborts_the_epoch_and_the_next_one_works(trainer: Deployment) -> None:
    with raises(Aborted, reason=Reason.EPOCH_ABORTED):
        await trainer.join(world_size=2, timeout_s=3.0)
    with pytest.raises(LockstepError) as caught:
        await trainer.call(TrainerService.SendWeights, pb.SendWeightsRequest(epoch=trainer.epoch, version=0))
    assert caught.value.reason in (Reason.NOT_JOINED, Reason.EPOCH_ABORTED)
    before = trainer.stamp
    assert await trainer.publish() == before


async def test_no_run_no_answer(deployment: Deployment) -> None:
    run_id = (await deployment.call(TrainerService.GetInfo, pb.GetInfoRequest())).info.run_id
    await deployment.call(TrainerService.CloseRun, pb.CloseRunRequest(run_id="another"))
    assert (await deployment.call(TrainerService.GetInfo, pb.GetInfoRequest())).info.run_id == run_id
    await deployment.call(TrainerService.CloseRun, pb.CloseRunRequest(run_id=run_id))
    info = (await deployment.call(TrainerService.GetInfo, pb.GetInfoRequest())).info
    assert (info.service, info.state, info.run_id) == ("trainer", "idle", "")
    batch = deployment.batch(PolicyStamp(version=0, digest=OTHER_DIGEST))
    for call in (
        deployment.train(batch, stamp=PolicyStamp(version=0, digest=OTHER_DIGEST)),
        deployment.forward(batch),
        deployment.join(),
        deployment.call(TrainerService.SendWeights, pb.SendWeightsRequest(epoch=1)),
        deployment.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path="/nowhere")),
        deployment.call(TrainerService.ExportHuggingFace, pb.ExportHuggingFaceRequest(path="/nowhere")),
    ):
        with raises(PreconditionFailed, reason=Reason.RUN_NOT_OPEN):
            await call


async def test_opening_the_same_run_again_keeps_what_it_holds(deployment: Deployment) -> None:
    request = pb.OpenRunRequest(
        run_id="again", config_json="{}", model_path=str(deployment.models / "untied"), bucket_bytes=1 << 16
    )
    deployment.opened = await deployment.call(TrainerService.OpenRun, request)
    await deployment.publish()
    batch = deployment.batch()
    off = changed(batch, "logprobs", (await deployment.forward(batch))["logprobs"].to_pylist())
    await deployment.train(off, batch_id="first")
    again = await deployment.call(TrainerService.OpenRun, request)
    assert (again.version, again.last_batch_id) == (1, "first")
    info = await deployment.call(TrainerService.GetInfo, pb.GetInfoRequest())
    assert (info.info.state, info.info.run_id, info.num_ranks) == ("open", "again", 2)


async def test_config_that_does_not_fit_is_refused(deployment: Deployment) -> None:
    for text in ('{"strategi": "fsdp"}', '{"optim": {"lr": -1}}', "[]", "no json", ""):
        with raises(InvalidInput, reason=Reason.INVALID_CONFIG):
            await deployment.call(TrainerService.OpenRun, pb.OpenRunRequest(run_id="bad", config_json=text))
