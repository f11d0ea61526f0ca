"""Tests that failed episodes and samples are worth nothing and change no other score, and that episodes wait."""

from services.coordinator.data.groups import ScoredGroup
from services.coordinator.rl.sampling.collect import PromptRequest
from tests.coordinator.fake_environment import FakeEnvironment, OpensEnvironment, episodes
from tests.coordinator.fake_services import make_config, make_prompt, replicas
from tests.coordinator.rl.sampling.test_episodes import CRASHED, SAMPLING, STAMP, DigitTokenizer, ends_after, played


async def judged(environment: FakeEnvironment, scorer: OpensEnvironment) -> ScoredGroup:
    """Returns an evaluated group of four samples."""
    config = make_config(
        environment={"kind": "python", "path": "m:C", "max_retries": 0},
        rollout={"max_model_len": 200, "sampling": {"max_tokens": 8}},
        data={"train": "x.parquet", "prompts_per_step": 8, "max_prompt_tokens": 16},
    )
    async with (
        replicas(1) as fakes,
        episodes(config, fakes, environment, STAMP, DigitTokenizer(), scorer) as collector,  # type: ignore[arg-type]
    ):
        request = PromptRequest(4, SAMPLING, STAMP, STAMP.version, keep_failed=True)
        group = await collector.one(0, make_prompt(0), request)
        assert group is not None
        return group


async def test_failed_episodes_are_not_judged_and_the_others_are():
    for num_failures in (1, 4):
        scorer = OpensEnvironment(set())
        group = await judged(FakeEnvironment(ends_after(1), [CRASHED] * num_failures), scorer)
        assert scorer.num_judged == [3] * (num_failures == 1)
        assert sorted(group.rewards) == [0.0] * num_failures + [1.5] * (4 - num_failures)
        assert group.is_failed.sum() == num_failures and group.scorer == "fake 1"
        assert [bool(score.components) for score in group.scores] == (~group.is_failed).tolist()


async def test_an_environment_rewards_no_sample_that_could_not_be_scored():
    prompt_id = make_prompt(0).prompt_id
    group = await judged(FakeEnvironment(ends_after(1)), OpensEnvironment({prompt_id}))
    assert group.is_failed.tolist() == [True, False, False, False]
    assert group.rewards.tolist() == [0.0, 1.5, 1.5, 1.5]


async def test_episodes_beyond_the_limit_wait_before_they_begin():
    environment = FakeEnvironment(ends_after(3))
    groups = await played(environment, num=4, max_concurrent=3)
    assert len(groups) == 4 and all(group is not None for group in groups)
    assert environment.most_open == 3 and len(environment.resets) == 8
