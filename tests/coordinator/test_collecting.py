"""Prompts in, scored groups out: always in the same order, with the failures of scorers as the config says."""

import asyncio
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import pytest_asyncio
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp

from services.common.config.advantage import AdvantageConfig
from services.common.config.rollout import SamplingConfig
from services.common.errors import LockstepError, Reason
from services.common.rpc import Server
from services.coordinator.advantages import credit
from services.coordinator.clients.reward import Reward
from services.coordinator.clients.rollout import Rollout
from services.coordinator.collect import Collector
from services.coordinator.groups import ScoredGroup, to_table
from tests.coordinator.fake_services import FakeReplica, FakeReward, make_config, make_prompt, replicas

STAMP = PolicyStamp(version=2, digest="d" * 32)
TOKENIZER = SimpleNamespace(eos_token_ids=(1,), decode=lambda tokens: " ".join(map(str, tokens)))
PROMPTS = [make_prompt(index) for index in range(12)]


@pytest_asyncio.fixture
async def scoring() -> AsyncIterator[tuple[FakeReward, str]]:
    server, fake = Server(), FakeReward(set())
    reward_pb2_grpc.add_RewardServiceServicer_to_server(fake, server.grpc)
    port = await server.start("127.0.0.1:0", ["lockstep.reward.v1.RewardService"])
    yield fake, f"127.0.0.1:{port}"
    await server.grpc.stop(0)


async def collect(
    address: str, fakes: list[FakeReplica], policy: str = "fail", *, seed: int = 7, stamp: PolicyStamp = STAMP
) -> list[ScoredGroup]:
    config = make_config(reward={"scorers": [{"kind": "exact"}], "on_failure": policy})
    rollout, reward = Rollout([fake.address for fake in fakes], config), Reward(address, config)
    try:
        await rollout.open("run", ModelCard())
        for replica in rollout.replicas:
            await replica.commit(stamp)
        return await Collector(rollout, reward, TOKENIZER, seed).collect(PROMPTS, 3, SamplingConfig(), stamp)
    finally:
        await rollout.close()
        await reward.close()


async def test_the_batch_does_not_depend_on_who_is_first(scoring):
    _, address = scoring
    tables = []
    for number in range(2):
        chance = random.Random(number)
        async with replicas(1 + number, max_samples=6) as fakes:
            for fake in fakes:
                fake.before_answer = lambda prompt: asyncio.sleep(chance.uniform(0, 0.03))  # noqa: B023
            tables.append(to_table(await collect(address, fakes)))
            answered = [prompt_id for fake in fakes for prompt_id in fake.answered]
            assert answered != [prompt.prompt_id for prompt in PROMPTS]
    assert tables[0].equals(tables[1])
    assert tables[0]["prompt_id"].to_pylist() == [prompt.prompt_id for prompt in PROMPTS for _ in range(3)]
    assert tables[0]["group"].to_pylist() == [index for index in range(12) for _ in range(3)]
    assert tables[0]["sample"].to_pylist() == [0, 1, 2] * 12
    assert set(tables[0]["policy_digest"].to_pylist()) == {STAMP.digest}


async def test_seeds_follow_from_run_seed_step_prompt_and_sample(scoring):
    _, address = scoring
    async with replicas(1) as fakes:
        seeds = [
            [c.seed for group in groups for c in group.completions]
            for groups in (
                await collect(address, fakes),
                await collect(address, fakes),
                await collect(address, fakes, seed=8),
                await collect(address, fakes, stamp=PolicyStamp(version=3, digest="e")),
            )
        ]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2], *seeds[3]}) == 3 * len(seeds[0])


@pytest.mark.parametrize(("policy", "kept"), [("zero", 12), ("drop_group", 10)])
async def test_a_sample_without_a_score(scoring, policy: str, kept: int):
    fake, address = scoring
    fake.failing = {"p3", "p5"}
    async with replicas(1) as fakes:
        groups = await collect(address, fakes, policy)
    assert len(groups) == kept
    rewards = {group.prompt.prompt_id: group.rewards.tolist() for group in groups}
    assert rewards["p4"] == [1, 1, 1]
    assert rewards.get("p3") == ([0, 1, 1] if policy == "zero" else None)
    table = credit(to_table(groups), AdvantageConfig(kind="dr_grpo"))
    assert table.num_rows == 3 * kept
    if policy == "zero":
        assert [row[0] for row in table["advantages"].to_pylist()[9:12]] == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


async def test_fail_names_prompt_scorer_and_reason(scoring):
    fake, address = scoring
    fake.failing = {"p3"}
    async with replicas(1) as fakes:
        with pytest.raises(LockstepError, match=r"p3.*fake.*TIMEOUT.*too slow") as raised:
            await collect(address, fakes, "fail")
    assert raised.value.reason is Reason.REWARD_FAILED


async def test_a_batch_without_any_score_is_an_error(scoring):
    fake, address = scoring
    fake.failing = {prompt.prompt_id for prompt in PROMPTS}
    async with replicas(1) as fakes:
        with pytest.raises(LockstepError, match="no prompt group could be scored"):
            await collect(address, fakes, "drop_group")
