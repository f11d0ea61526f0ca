"""The rollout benchmark draws through the coordinator's own collector, which changes; so it is tried here."""

from lockstep.types.v1.types_pb2 import PolicyStamp

from benchmarks.rollout_ends import Service
from services.common.config.rollout import SamplingConfig
from tests.coordinator.fake_services import FakeReward, collector, make_config, make_prompt, replicas

STAMP = PolicyStamp(version=2, digest="d" * 32)


async def test_every_group_is_timed_and_every_token_counted():
    config, prompts = make_config(rollout={"completions_per_prompt": 4}), [make_prompt(index) for index in range(5)]
    async with replicas(2) as fakes, collector(config, fakes, FakeReward(set()), STAMP) as collects:
        service = Service(collects._rollout, config, STAMP, pids=())
        batch = service.batch(prompts, SamplingConfig())
        drawn = await service.draw(batch)
    assert [len(set(seeds)) for seeds in batch.seeds] == [4] * 5
    assert drawn.num_tokens == 5 * 4 * 2  # a replica's samples have two tokens here
    assert len(drawn.finished_s) == 5
    assert 0 < min(drawn.finished_s) <= max(drawn.finished_s) <= drawn.duration_s
