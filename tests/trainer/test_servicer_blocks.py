"""Tests batches that are sent in blocks to a real trainer of two ranks over gRPC."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches import BlockCutter, blocks_of
from services.common.errors import Aborted, DataLoss, InvalidInput, LockstepError, PreconditionFailed, Reason
from services.trainer.contract import MAX_SKIPPED
from tests.support import make_batch, raises
from tests.trainer.deployment import Deployment, as_stream, block_messages
from tests.trainer.harness_processes import few_of, marked
from tests.trainer.test_servicer import changed, of_other_content, with_row

BACKENDS: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "Megatron": {"strategy": "megatron", "num_ranks": 2},
    "Megatron, pipeline": {"strategy": "megatron", "num_ranks": 2, "megatron": {"pipeline_model_parallel_size": 2}},
}
Messages = list[pb.TrainRequest]


def header_of(trainer: Deployment, batch_id: str = "streamed", tokens: int = 1, **more: Any) -> pb.TrainHeader:
    header = pb.TrainHeader(
        expected_stamp=trainer.stamp, batch_id=batch_id, temperature=1.0, role=pb.ROLE_POLICY, tokens_per_block=tokens
    )
    for name, value in more.items():
        setattr(header, name, value)
    return header


async def send(trainer: Deployment, messages: Sequence[pb.TrainRequest]) -> pb.TrainResponse:
    return await trainer.call(TrainerService.Train, as_stream(messages))


async def refused(trainer: Deployment, messages: Messages) -> LockstepError:
    """Returns the error of Train; asserts that nothing was applied: version and content are what they were."""
    before = trainer.stamp
    with pytest.raises(LockstepError) as caught:
        await send(trainer, messages)
    assert await trainer.current_stamp() == before
    assert await trainer.publish() == before
    return caught.value


async def digest_after_whole(trainer: Deployment, tokens: int, **changes: Any) -> tuple[PolicyStamp, dict[str, float]]:
    """Trains a fresh run on the whole batch; returns the stamp and the metrics that a stream must give, too."""
    await trainer.open(**changes)
    await trainer.publish()
    groups = 4 // changes["num_minibatches"] if "num_minibatches" in changes else 0
    answer = await trainer.train(trainer.batch(), tokens_per_block=tokens, groups_per_minibatch=groups)
    return await trainer.publish(), without_times(answer.metrics)


async def assert_close_without_blocks(trainer: Deployment, metrics: dict[str, float], **changes: Any) -> None:
    """Asserts that the same update without blocks differs by rounding only.

    Float32 sums of about 100 terms are in another order.
    """
    await trainer.open(**changes)
    await trainer.publish()
    at_once = without_times((await trainer.train(trainer.batch())).metrics)
    assert metrics == pytest.approx(at_once, rel=1e-4, abs=1e-5)


def without_times(metrics: Any) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


# These numbers of tokens make blocks of one group, blocks of two groups, and a block of three and one of one.
# tests/trainer/megatron/test_blocks.py compares blocks in every layout of Megatron.
FEW = {("FSDP", 60), ("Megatron, pipeline", 1)}


@pytest.mark.parametrize(("backend", "tokens"), few_of(FEW, BACKENDS, (1, 60, 100)))
async def test_a_stream_ends_with_the_weights_of_the_whole_batch(
    deployment: Deployment, backend: str, tokens: int
) -> None:
    loss = {"aggregation": "token_mean" if tokens == 1 else "seq_mean_token_mean", "entropy_coef": 0.01}
    changes = {"loss": loss, "max_tokens_per_microbatch": 64, **BACKENDS[backend]}
    whole, metrics = await digest_after_whole(deployment, tokens, **changes)
    await deployment.open(**changes)
    await deployment.publish()
    answer = await send(deployment, block_messages(header_of(deployment, tokens=tokens), deployment.batch()))
    assert (answer.version, answer.replayed) == (1, False)
    assert await deployment.publish() == whole
    assert without_times(answer.metrics) == metrics
    await assert_close_without_blocks(deployment, metrics, **changes)


FEW_OLD = {("FSDP", "engine"), ("Megatron, pipeline", "recompute")}


@pytest.mark.parametrize(("backend", "old"), few_of(FEW_OLD, BACKENDS, ("recompute", "engine")))
async def test_several_minibatches_may_be_streamed(deployment: Deployment, backend: str, old: str) -> None:
    changes = {"num_minibatches": 2, "loss": {"old_logprobs": old, "entropy_coef": 0.01}, **BACKENDS[backend]}
    changes |= {"max_tokens_per_microbatch": 64}
    whole, metrics = await digest_after_whole(deployment, 1, **changes)
    await deployment.open(**changes)
    before = await deployment.publish()
    messages = block_messages(header_of(deployment, groups_per_minibatch=2), deployment.batch())
    with raises(DataLoss, reason=Reason.CORRUPT_TRANSFER):
        await send(deployment, messages[:-1])
    assert await deployment.publish() == before
    answer = await send(deployment, messages)
    assert await deployment.publish() == whole
    assert without_times(answer.metrics) == metrics
    await assert_close_without_blocks(deployment, metrics, **changes)


async def test_minibatches_of_fewer_groups_have_smaller_blocks(deployment: Deployment) -> None:
    """Tests a step that found 6 of 8 groups: its mini-batches have 3 groups, in blocks of one or two."""
    changes = {"num_minibatches": 2, "loss": {"entropy_coef": 0.01}}
    metrics = []
    for tokens in (33, 0):
        await deployment.open(**changes)
        batch = make_batch(6, 2, await deployment.publish())
        groups = 3 if tokens else 0
        answer = await deployment.train(batch, tokens_per_block=tokens, groups_per_minibatch=groups)
        metrics.append(without_times(answer.metrics))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("backend", marked(BACKENDS, ["Megatron"]))
async def test_a_stream_that_breaks_at_any_message_leaves_nothing_behind(deployment: Deployment, backend: str) -> None:
    whole, _ = await digest_after_whole(deployment, 0, **BACKENDS[backend])
    await deployment.open(**BACKENDS[backend])
    before = await deployment.publish()
    messages = block_messages(header_of(deployment, tokens=60), deployment.batch())
    for length in range(len(messages)):
        # First the stream ends in order, but too early; then the caller cuts it while the deployment waits for more.
        with pytest.raises((InvalidInput, DataLoss)):
            await send(deployment, messages[:length])
        taken = asyncio.Event()

        async def stuck(length: int = length, taken: asyncio.Event = taken) -> AsyncIterator[pb.TrainRequest]:
            for message in messages[:length]:
                yield message
            taken.set()
            await asyncio.Event().wait()

        call = asyncio.create_task(deployment.call(TrainerService.Train, stuck()))
        await taken.wait()
        call.cancel()
        await asyncio.wait({call})
        assert await deployment.current_stamp() == before
    assert await deployment.publish() == before
    # For a batch without blocks, nothing else discards gradients before the update.
    await deployment.train(deployment.batch(), batch_id="streamed")
    assert await deployment.publish() == whole


async def test_a_batch_is_applied_once_however_it_is_sent(trainer: Deployment) -> None:
    batch, header = trainer.batch(), header_of(trainer)
    first = await send(trainer, block_messages(header, batch))
    again = await trainer.train(batch, batch_id="streamed", stamp=header.expected_stamp, tokens_per_block=1)
    assert (again.replayed, again.version, dict(again.metrics)) == (True, 1, dict(first.metrics))
    streamed_again = await send(trainer, block_messages(header, batch))
    assert (streamed_again.replayed, dict(streamed_again.metrics)) == (True, dict(first.metrics))


@pytest.mark.parametrize("stream", [False, True])
async def test_batch_id_cannot_name_the_same_samples_with_another_header(trainer: Deployment, stream: bool) -> None:
    stamp, batch = trainer.stamp, trainer.batch()
    first = await trainer.train(batch, batch_id="b")
    after = await trainer.publish()
    changes: list[tuple[str, dict[str, Any]]] = [
        ("temperature", {"temperature": 0.5}),
        ("expected_stamp", {"stamp": of_other_content(stamp)}),
        ("drawn_stamp", {"drawn_stamp": stamp}),
        ("critic_version", {"critic_version": 1}),
    ]

    async def again(samples: pa.Table, **header: Any) -> Any:
        if not stream:
            return await trainer.train(samples, batch_id="b", **{"stamp": stamp, **header})
        header = {"expected_stamp": header.pop("stamp", stamp), "temperature": 1.0, **header}
        head = pb.TrainHeader(batch_id="b", role=pb.ROLE_POLICY, tokens_per_block=1, **header)
        return await trainer.call(TrainerService.Train, as_stream(block_messages(head, samples)))

    for field, change in changes:
        with raises(PreconditionFailed, reason=Reason.REPLAYED_BATCH) as caught:
            await again(batch, **change)
        assert f"was applied with {field}" in caught.value.message
    with raises(PreconditionFailed, reason=Reason.REPLAYED_BATCH) as caught:
        await again(with_row(batch, "reward", 5, 1.0))
    assert "other samples" in caught.value.message
    answer = await again(batch)
    assert (answer.replayed, dict(answer.metrics)) == (True, dict(first.metrics))
    assert await trainer.publish() == after


async def test_every_block_and_the_whole_are_checked(trainer: Deployment) -> None:
    batch = trainer.batch()
    good = block_messages(header_of(trainer), batch)
    error = await refused(trainer, good[1:])
    assert error.metadata.get("field") == "header", error
    assert (await refused(trainer, block_messages(header_of(trainer, batch_id=""), batch))).metadata[
        "field"
    ] == "batch_id"
    # One sample of the last block was drawn by other weights.
    late = with_row(batch, "policy_digest", 11, "f" * 32)
    error = await refused(trainer, block_messages(header_of(trainer), late))
    assert (type(error), error.reason) == (PreconditionFailed, Reason.DIGEST_MISMATCH)
    # A block is missing, doubled, or larger than the header says.
    blocks = blocks_of(batch, BlockCutter(1))
    for sent, kind in (
        (blocks[:3], DataLoss),
        ([*blocks[:2], *blocks[1:]], InvalidInput),
        (blocks_of(batch, BlockCutter(60)), InvalidInput),
    ):
        assert type(await refused(trainer, block_messages(header_of(trainer), batch, sent))) is kind
    # The record has other values than the blocks that were sent.
    other = block_messages(header_of(trainer), changed(batch, "reward", [0.5] * batch.num_rows))
    error = await refused(trainer, [*good[:-1], other[-1]])
    assert (type(error), error.reason) == (DataLoss, Reason.CORRUPT_TRANSFER)
    wrong_block = pb.TrainRequest(block=pb.TrainBlock(sha256=b"x"))
    is_block = [message.WhichOneof("part") == "block" for message in good]
    flipped = [wrong_block if at == is_block.index(True) else message for at, message in enumerate(good)]
    assert (await refused(trainer, flipped)).reason is Reason.CORRUPT_TRANSFER
    assert (await send(trainer, good)).version == 1


async def test_a_message_out_of_place_and_a_batch_without_trained_tokens_are_refused(trainer: Deployment) -> None:
    batch = trainer.batch()
    good = block_messages(header_of(trainer), batch)
    for sent, part in (([good[0], *good], "header"), ([*good[:2], good[-1]], "commit")):  # twice; inside a block
        error = await refused(trainer, sent)
        assert (type(error), error.message) == (InvalidInput, f"{part}: not expected here")
    masked = changed(batch, "loss_mask", [[False] * len(row) for row in batch["tokens"].to_pylist()])
    messages = block_messages(header_of(trainer), masked)
    messages[-1].commit.num_tokens = 0
    error = await refused(trainer, messages)
    assert (type(error), error.metadata["field"]) == (InvalidInput, "loss_mask")
    assert "masks every token" in error.message


async def test_a_gap_is_found_before_anything_is_applied(deployment: Deployment) -> None:
    await deployment.open(max_logprob_diff=2.0)
    await deployment.publish()
    batch = deployment.batch()
    off = changed(batch, "logprobs", [[-60.0] * len(row) for row in batch["tokens"].to_pylist()])
    error = await refused(deployment, block_messages(header_of(deployment), off))
    assert (type(error), error.reason) == (PreconditionFailed, Reason.LOGPROB_DIFF)
    assert (await send(deployment, block_messages(header_of(deployment), batch))).version == 1


async def _save(trainer: Deployment, directory: Path) -> None:
    await trainer.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(directory / "checkpoint")))


async def _stream_again(trainer: Deployment, directory: Path) -> None:
    with pytest.raises(DataLoss):
        await send(trainer, block_messages(header_of(trainer, "other"), trainer.batch())[:-1])


@pytest.mark.parametrize("other", [_save, pytest.param(_stream_again, marks=pytest.mark.long)])
async def test_another_call_ends_the_stream_and_the_whole_batch_has_its_result(
    deployment: Deployment, tmp_path: Path, other: Callable[[Deployment, Path], Any]
) -> None:
    whole, _ = await digest_after_whole(deployment, 1)
    await deployment.open()
    await deployment.publish()
    messages, goes_on = block_messages(header_of(deployment), deployment.batch()), asyncio.Event()
    reached = asyncio.Event()

    async def interrupted() -> AsyncIterator[pb.TrainRequest]:
        for message in messages[:-1]:
            yield message
        reached.set()
        await goes_on.wait()
        yield messages[-1]

    call = asyncio.create_task(deployment.call(TrainerService.Train, interrupted()))
    await reached.wait()
    # The messages were sent; a Forward is answered after the blocks that the ranks have got.
    await deployment.forward(deployment.batch())
    await other(deployment, tmp_path)
    goes_on.set()
    with raises(Aborted, reason=Reason.STREAM_ENDED):
        await call
    await deployment.train(deployment.batch(), batch_id="streamed", tokens_per_block=1)
    assert await deployment.publish() == whole


def spoil(batch: pa.Table, *rows: int) -> pa.Table:
    """Returns the batch with advantages in `rows` for which the loss `spoiled` is NaN."""
    lists = batch["advantages"].to_pylist()
    return changed(batch, "advantages", [[2000.0] * len(x) if row in rows else x for row, x in enumerate(lists)])


FEW_SPOILED = {("FSDP", 60), ("Megatron, pipeline", 0)}


@pytest.mark.parametrize(("backend", "tokens"), few_of(FEW_SPOILED, BACKENDS, (0, 60)))
async def test_a_gradient_that_is_not_finite_is_skipped(deployment: Deployment, backend: str, tokens: int) -> None:
    changes: dict[str, Any] = {"loss": {"kind": "python", "import_path": "tests.user_functions:spoiled"}}
    changes |= BACKENDS[backend]
    digests = []
    for spoils in (True, False):
        await deployment.open(**changes)
        await deployment.publish()
        await deployment.train(deployment.batch(), tokens_per_block=tokens)
        before = await deployment.publish()
        if spoils:
            answer = await deployment.train(spoil(deployment.batch(), 5), tokens_per_block=tokens)
            assert (answer.version, answer.metrics["skipped"], answer.metrics["grad_norm"]) == (2, 1, 0)
            # The batch counts as applied: the version is the next one, with the weights of the one before.
            assert await deployment.publish() == PolicyStamp(version=2, digest=before.digest)
        answer = await deployment.train(deployment.batch(seed=1), tokens_per_block=tokens)
        assert answer.metrics["skipped"] == 0
        digests.append((await deployment.publish()).digest)
    assert digests[0] == digests[1]  # moments and their count were left alone, too


async def test_one_of_several_updates_is_skipped(deployment: Deployment) -> None:
    await deployment.open(num_minibatches=2, loss={"kind": "python", "import_path": "tests.user_functions:spoiled"})
    before = await deployment.publish()
    for bad, row in ((1, 0), (1, 11)):  # of the first mini-batch; of the second
        answer = await deployment.train(spoil(deployment.batch(), row))
        assert answer.metrics["skipped"] == bad
        assert all(map(math.isfinite, answer.metrics.values()))
        assert answer.metrics["grad_norm"] > 0
        before, after = await deployment.publish(), before
        assert before.digest != after.digest


async def test_a_run_of_skipped_batches_is_refused(deployment: Deployment, tmp_path: Path) -> None:
    loss = {"kind": "python", "import_path": "tests.user_functions:spoiled"}
    await deployment.open(loss=loss)
    first = await deployment.publish()
    for _ in range(MAX_SKIPPED - 1):
        assert (await deployment.train(spoil(deployment.batch(), 5))).metrics["skipped"] == 1
        await deployment.publish()
    await _save(deployment, tmp_path)
    for _ in range(2):  # it counts on from a checkpoint
        with raises(PreconditionFailed, reason=Reason.NONFINITE_GRADIENT) as caught:
            await deployment.train(spoil(deployment.batch(), 5))
        assert f"of {MAX_SKIPPED} batches in a row" in caught.value.message
        assert await deployment.publish() == PolicyStamp(version=MAX_SKIPPED - 1, digest=first.digest)
        await deployment.open(checkpoint=str(tmp_path / "checkpoint"), loss=loss)
        await deployment.publish()
    assert (await deployment.train(deployment.batch())).metrics["skipped"] == 0
    await deployment.publish()
    assert (await deployment.train(spoil(deployment.batch(), 5))).version == MAX_SKIPPED + 1


async def test_a_gradient_that_is_not_finite_may_end_the_run(deployment: Deployment) -> None:
    loss = {"kind": "python", "import_path": "tests.user_functions:spoiled"}
    await deployment.open(loss=loss, optim={"on_nonfinite": "fail"})
    await deployment.publish()
    error = await refused(deployment, block_messages(header_of(deployment), spoil(deployment.batch(), 5)))
    assert (type(error), error.reason) == (PreconditionFailed, Reason.NONFINITE_GRADIENT)
