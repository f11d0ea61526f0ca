"""Tests that a replica that serves metrics makes vLLM count its own too."""

import asyncio

from services.common.config.rollout import RolloutConfig
from services.rollout.metrics import with_statistics
from tests.common.telemetry.watched import Labels, scrape
from tests.rollout.rollout_stack import MAX_MODEL_LEN, PlayedTrainer
from tests.support import PATIENCE_S

GAUGES = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")


def one(metrics: dict[str, dict[Labels, float]], name: str) -> float:
    (value,) = metrics[name].values()
    return value


async def test_the_use_of_the_kv_cache_is_on_the_page(played: PlayedTrainer) -> None:
    played.draw(seed=106)
    stamp = await played.publish(106)
    prompts = [[3 + index] for index in range(30)]
    call = asyncio.create_task(played.replica.generate(stamp, prompts, seeds=range(12), max_tokens=MAX_MODEL_LEN - 1))
    async with asyncio.timeout(PATIENCE_S):  # more samples than max_samples, so that some wait
        while not all([one(seen, name) for name in GAUGES] if GAUGES[0] in (seen := await page(played)) else [0]):
            await asyncio.sleep(0.05)
    assert 0 < one(seen, GAUGES[0]) <= 1
    assert one(seen, GAUGES[1]) <= RolloutConfig().max_samples < one(seen, GAUGES[1]) + one(seen, GAUGES[2])
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def page(played: PlayedTrainer) -> dict[str, dict[Labels, float]]:
    return await asyncio.to_thread(scrape, played.replica.page)


def test_the_config_has_the_last_word() -> None:
    assert with_statistics(RolloutConfig(engine={"seed": 1})).engine == {"disable_log_stats": False, "seed": 1}
    silent = RolloutConfig(engine={"disable_log_stats": True})
    assert with_statistics(silent) == silent
