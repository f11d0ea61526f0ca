"""Tests the collector: groups keep the order of the prompts, and scorer failures are handled as configured."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import pytest
from lockstep.rollout.v1 import rollout_pb2
from lockstep.rollout.v1.rollout_pb2 import Drafts
from lockstep.types.v1.types_pb2 import PolicyStamp, SamplingParams

from services.common.config.advantage import AdvantageConfig
from services.common.config.evaluation import EvalSetConfig
from services.common.config.rollout import SamplingConfig
from services.common.errors import LockstepError, Reason
from services.common.tasks import gather
from services.coordinator.data.groups import ScoredGroup, to_table
from services.coordinator.rl.advantages import compute_advantages
from services.coordinator.rl.evaluation import eval_sampling
from services.coordinator.rl.sampling.collect import PromptRequest
from tests.coordinator.fake_services import FakeReplica, FakeReward, collector, make_config, make_prompt, replicas

STAMP = PolicyStamp(version=2, digest="d" * 32)
PROMPTS = [make_prompt(index) for index in range(12)]


async def collect(
    fakes: list[FakeReplica],
    policy: str = "fail",
    *,
    failing: Iterable[str] = (),
    seed: int = 7,
    stamp: PolicyStamp = STAMP,
) -> list[ScoredGroup]:
    config = make_config(reward={"scorers": [{"kind": "exact"}], "on_failure": policy}, seed=seed)
    async with collector(config, fakes, FakeReward(set(failing)), stamp) as collects:
        request = PromptRequest(3, SamplingConfig(), stamp, stamp.version)
        return [group for group in await gather(collects.one(i, p, request) for i, p in enumerate(PROMPTS)) if group]


async def test_the_batch_does_not_depend_on_who_is_first():
    tables = []
    for number in range(2):
        chance, late, last = random.Random(number), f"p{3 * number}", asyncio.Event()

        async def before_answer(prompt: object, chance=chance, late=late, last=last) -> None:
            if prompt.prompt_id == late:  # after one that is asked for last
                await last.wait()
            await asyncio.sleep(chance.uniform(0, 0.03))
            if prompt.prompt_id == PROMPTS[-1].prompt_id:
                last.set()

        async with replicas(1 + number, max_samples=6) as fakes:
            for fake in fakes:
                fake.before_answer = before_answer
            tables.append(to_table(await collect(fakes)))
            answered = [prompt_id for fake in fakes for prompt_id in fake.answered]
            assert answered != [prompt.prompt_id for prompt in PROMPTS]
    assert tables[0].equals(tables[1])
    assert tables[0]["prompt_id"].to_pylist() == [prompt.prompt_id for prompt in PROMPTS for _ in range(3)]
    assert tables[0]["group"].to_pylist() == [index for index in range(12) for _ in range(3)]
    assert tables[0]["sample"].to_pylist() == [0, 1, 2] * 12
    assert set(tables[0]["policy_digest"].to_pylist()) == {STAMP.digest}


async def test_seeds_follow_from_run_seed_step_prompt_and_sample():
    async with replicas(1) as fakes:
        seeds = [
            [c.seed for group in groups for c in group.completions]
            for groups in (
                await collect(fakes),
                await collect(fakes),
                await collect(fakes, seed=8),
                await collect(fakes, stamp=PolicyStamp(version=3, digest="e")),
            )
        ]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2], *seeds[3]}) == 3 * len(seeds[0])


@pytest.mark.parametrize(("policy", "kept"), [("zero", 12), ("drop_group", 10)])
async def test_a_sample_without_a_score(policy: str, kept: int):
    async with replicas(1) as fakes:
        groups = await collect(fakes, policy, failing={"p3", "p5"})
    assert len(groups) == kept
    rewards = {group.prompt.prompt_id: group.rewards.tolist() for group in groups}
    assert rewards["p4"] == [1, 1, 1]
    assert rewards.get("p3") == ([0, 1, 1] if policy == "zero" else None)
    table = compute_advantages(to_table(groups), AdvantageConfig(kind="dr_grpo"))
    assert table.num_rows == 3 * kept
    if policy == "zero":
        assert [row[0] for row in table["advantages"].to_pylist()[9:12]] == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


async def test_fail_names_prompt_scorer_and_reason():
    async with replicas(1) as fakes:
        with pytest.raises(LockstepError, match=r"p3.*fake.*TIMEOUT.*too slow") as raised:
            await collect(fakes, "fail", failing={"p3"})
    assert raised.value.reason is Reason.REWARD_FAILED


async def test_a_step_counts_what_was_drafted_for_its_samples():
    async with replicas(1) as fakes, collector(make_config(), fakes, FakeReward(set()), STAMP) as collects:
        request = PromptRequest(3, SamplingConfig(), STAMP, STAMP.version)
        await collects.one(0, PROMPTS[0], request)
        assert collects.take_metrics() == {}  # nothing is drafted
        fakes[0].drafts = Drafts(num_drafts=4, num_drafted=15, num_accepted=6)
        await gather(collects.one(index, PROMPTS[index], request) for index in (1, 2))
        await collects.one(3, PROMPTS[3], replace(request, keep_failed=True))  # an evaluation's
        expected = {"drafted_tokens": 30, "accepted_tokens": 12, "accepted_per_draft": 1.5}
        assert collects.take_metrics() == {f"speculation/{name}": value for name, value in expected.items()}
        fakes[0].drafts.seconds = 0.25
        await collects.one(4, PROMPTS[4], request)
        assert collects.take_metrics()["speculation/draft_s"] == 0.25
        assert collects.take_metrics() == {}


async def test_penalties_and_ends_of_completions_reach_the_engine():
    asked: list[SamplingParams] = []

    class Seen(FakeReplica):
        async def Generate(
            self, request: rollout_pb2.GenerateRequest, context: Any
        ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
            asked.append(request.sampling)
            async for answer in super().Generate(request, context):
                yield answer

    config = make_config()
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.25}
    truncation = {"temperature": 1.0, "top_p": 0.75, "top_k": 7, "min_p": 0.25}
    async with replicas(1, Seen) as fakes, collector(config, fakes, FakeReward(set()), STAMP) as collects:
        for training in (
            SamplingConfig(max_tokens=9, stop_token_ids=(7, 7), top_k=5, min_tokens=3, bad_words=("ab", " ab")),
            SamplingConfig(max_tokens=9, stop_token_ids=(7,), ignore_eos=True),
        ):
            held = EvalSetConfig(min_tokens=4, max_tokens=2000, bad_words=("c",), **penalties, **truncation)
            held_out = eval_sampling(held, training)
            for sampling in (training, held_out):
                await collects.collect("math", [make_prompt(0)], 1, sampling, STAMP)
    own, alone = [list(one.stop_token_ids) for one in asked[1:3]]
    assert own == [*own[:-1], 7] and len(own) > 1 and alone == [7]
    assert [one.min_tokens for one in asked] == [3, 4, 0, 4]
    cut = [(one.top_p, one.top_k, one.min_p) for one in asked]
    assert cut == [(1, 5, 0), (0.75, 7, 0.25), (1, 0, 0), (0.75, 7, 0.25)]
    bad_words = [[list(sequence.tokens) for sequence in one.bad_words] for one in asked]
    assert bad_words == [[[97, 98], [97, 98]], [[99]], [], [[99]]]
    for one in (asked[0], asked[2]):
        assert (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) == (1, 0, 0)
    for one in (asked[1], asked[3]):
        assert (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) == (1.5, 0.5, -0.25)
