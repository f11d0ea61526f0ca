"""Tests with a real trainer and real engines that replicas serve exactly the trainer's weights after a publication."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import pytest_asyncio
from lockstep.trainer.v1 import trainer_pb2
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Completion, PolicyStamp

from services.common import batches
from services.common.errors import Aborted
from services.common.rpc.transfer import from_messages, to_messages
from services.coordinator.clients.trainer import whole_batch
from tests.rollout.rollout_stack import GREEDY_TOKENS, PROMPTS, Stack, completions, greedy_by_transformers, load_model
from tests.support import PATIENCE_S, raises
from tests.trainer.harness_processes import marked

# Both ends compute in float32. The difference was measured as 3e-5 for a model of 9.5M parameters; a wrong weight,
# temperature or position shows above 1e-2.
MAX_LOGPROB_DIFF = 1e-4
NUM_VERSIONS = 2
SEEDS = (11, 12, 13, 14)
LENGTH = 40  # an engine sends 1 token, then 32, then the rest
# An Adam step moves every weight by about lr, a tenth of the spread that the weights were drawn with.
TRAINER = {
    "num_ranks": 2,
    "max_tokens_per_microbatch": 256,
    "max_logprob_diff": MAX_LOGPROB_DIFF,
    "optim": {"lr": 1e-2, "max_grad_norm": 1e9},
}


# With Megatron both ranks send: they take turns with what each has half of, or each sends its own experts.
MEGATRON = {
    "untied tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "moe ep2": {"expert_model_parallel_size": 2},
}


KINDS = ("untied", "tied", "moe", *MEGATRON)


def opened_as(*few: str) -> pytest.MarkDecorator:
    """Lets a test have a run of every kind; only make test-long runs those that are not in `few`."""
    return pytest.mark.parametrize("opened", marked(KINDS, set(KINDS) - {*few}), indirect=True, scope="module")


@pytest_asyncio.fixture(scope="module")
async def opened(request: pytest.FixtureRequest, stack: Stack, model) -> Stack:
    layout = MEGATRON.get(request.param)
    changes = {"strategy": "megatron", "megatron": layout} if layout else {}
    await stack.open(model(request.param.split()[0]), TRAINER | changes)
    assert stack.opened.plan.num_senders == (2 if layout else 1)
    return stack


async def export(stack: Stack, path: Path) -> Path:
    request = trainer_pb2.ExportHuggingFaceRequest(path=str(path))
    await stack.trainer.call(TrainerService.ExportHuggingFace, request, timeout_s=PATIENCE_S)
    return path


def to_batch(samples: list[Completion], stamp: PolicyStamp, prompts: Sequence[Sequence[int]] = PROMPTS) -> pa.Table:
    """Returns the samples of `prompts` x SEEDS as a batch with random advantages."""
    random = np.random.default_rng(stamp.version)
    rows = [
        {
            "prompt_id": str(index // len(SEEDS)),
            "group": index // len(SEEDS),
            "sample": index % len(SEEDS),
            "prompt_tokens": prompts[index // len(SEEDS)],
            "tokens": completion.tokens,
            "logprobs": completion.logprobs,
            "reward": 0.0,
            "components": [],
            "advantages": [random.normal()] * len(completion.tokens),
            "finish_reason": "length",
            "policy_version": stamp.version,
            "policy_digest": stamp.digest,
            "scorer": "test",
            "seed": completion.seed,
        }
        for index, completion in enumerate(samples)
    ]
    return pa.Table.from_pylist(rows, schema=batches.SAMPLE_SCHEMA)


async def forward(stack: Stack, batch: pa.Table, temperature: float) -> pa.Table:
    header = trainer_pb2.ForwardHeader(role=trainer_pb2.ROLE_POLICY, temperature=temperature)
    requests = to_messages(trainer_pb2.ForwardRequest, batches.encode(batch), header)
    answers = stack.trainer.stream(TrainerService.Forward, requests, timeout_s=PATIENCE_S)
    return batches.decode((await from_messages(answers, has_header=False))[1])


async def train(stack: Stack, batch: pa.Table, stamp: PolicyStamp) -> trainer_pb2.TrainResponse:
    header = trainer_pb2.TrainHeader(expected_stamp=stamp, batch_id=f"{stack.run_id}/{stamp.version}", temperature=1.0)
    requests = whole_batch(header, batch)
    return await stack.trainer.call(TrainerService.Train, requests, timeout_s=PATIENCE_S)


def largest_diff(batch: pa.Table, forwarded: pa.Table) -> float:
    behavior, trainer = (np.concatenate(t["logprobs"].to_pylist()) for t in (batch, forwarded))
    return float(np.abs(behavior - trainer).max())


@opened_as("untied", *MEGATRON)
async def test_publications_are_exact_and_every_sample_is_on_policy(opened: Stack, tmp_path: Path):
    digests, greedy_before = set(), None
    for version in range(NUM_VERSIONS):
        stamp = await opened.publish(version)
        assert stamp.version == version
        digests.add(stamp.digest)

        expected = greedy_by_transformers(load_model(await export(opened, tmp_path / str(version))), GREEDY_TOKENS)
        for replica in opened.replicas:
            assert (await replica.info()).stamp == stamp
            assert await replica.greedy(stamp) == expected
        assert expected != greedy_before
        greedy_before = expected

        for temperature in (0.7, 1.0) if version else (1.0,):
            answers = await opened.replicas[0].generate(stamp, seeds=SEEDS, temperature=temperature, max_tokens=LENGTH)
            assert all(answer.stamp == stamp for answer in answers)
            samples = completions(answers)
            assert [sample.seed for sample in samples] == list(SEEDS) * len(PROMPTS)
            batch = to_batch(samples, stamp)
            assert largest_diff(batch, await forward(opened, batch, temperature)) <= MAX_LOGPROB_DIFF
        # The wrong temperature must not pass for the right one.
        assert largest_diff(batch, await forward(opened, batch, 0.7)) > 100 * MAX_LOGPROB_DIFF

        trained = await train(opened, batch, stamp)  # the last batch, at temperature 1
        assert trained.version == version + 1
        assert trained.metrics["logprob_diff_max"] <= MAX_LOGPROB_DIFF
    assert len(digests) == NUM_VERSIONS


@opened_as("untied")
async def test_a_seed_gives_the_same_sample_in_any_company_and_on_any_replica(opened: Stack):
    version = (
        await opened.trainer.call(TrainerService.GetInfo, trainer_pb2.GetInfoRequest(), timeout_s=PATIENCE_S)
    ).stamp.version
    stamp = await opened.publish(version)
    first, second = opened.replicas
    crowd, elsewhere = await asyncio.gather(
        first.generate(stamp, seeds=SEEDS, temperature=1.0), second.generate(stamp, seeds=SEEDS, temperature=1.0)
    )
    alone = await first.generate(stamp, PROMPTS[3:4], seeds=SEEDS[1:2], temperature=1.0)
    again = await first.generate(stamp, PROMPTS[::-1], seeds=SEEDS[::-1], temperature=1.0)

    samples = completions(crowd)
    assert completions(elsewhere) == samples
    assert completions(again) == samples[::-1]
    assert completions(alone) == [crowd[3].completions[1]]
    # Seeds matter: samples of a prompt differ from each other.
    for answer in crowd:
        for one, other in itertools.combinations(answer.completions, 2):
            assert list(one.tokens) != list(other.tokens)


@opened_as("untied", "untied tp2")
async def test_a_member_that_does_not_come_ends_the_epoch_for_every_sender(opened: Stack):
    version = (
        await opened.trainer.call(TrainerService.GetInfo, trainer_pb2.GetInfoRequest(), timeout_s=PATIENCE_S)
    ).stamp.version
    stamp = await opened.publish(version)
    opened.epoch += 1
    group = opened.group(world_size=opened.opened.plan.num_senders + 1, timeout_s=3.0)
    with raises(Aborted):
        await opened.trainer.call(
            TrainerService.JoinWeightGroup, trainer_pb2.JoinWeightGroupRequest(group=group), timeout_s=PATIENCE_S
        )
    assert await opened.publish(version) == stamp


@opened_as("untied")
async def test_a_sample_ends_with_the_first_stop_token_and_keeps_it(opened: Stack):
    stamp = (await opened.replicas[0].info()).stamp
    whole = (await opened.replicas[0].greedy(stamp))[0]
    stop = whole[-1]
    first = whole.index(stop)
    (answer,) = await opened.replicas[0].generate(stamp, PROMPTS[:1], stop_token_ids=[stop])
    (stopped,) = answer.completions
    assert list(stopped.tokens) == whole[: first + 1]
    assert len(stopped.logprobs) == first + 1
    assert stopped.finish_reason == FINISH_REASON_STOP
    if first:  # one token earlier it is not yet there
        (answer,) = await opened.replicas[0].generate(stamp, PROMPTS[:1], stop_token_ids=[stop], max_tokens=first)
        assert answer.completions[0].finish_reason == FINISH_REASON_LENGTH
