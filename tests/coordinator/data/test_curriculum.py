"""Tests that the order of prompts in a step depends only on the dataset, seed, step and recorded outcomes."""

import asyncio
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.advantage import CurriculumConfig
from services.common.config.run import Config
from services.coordinator.data.prompts import by_success_rate, plain_order, prompts_to_try
from services.coordinator.runs.ledger import Ledger
from tests.coordinator.fake_services import make_config, make_prompt
from tests.coordinator.fake_steps import dataset, steps


def config_of(prompts_per_step: int = 4, **sections: Any) -> Config:
    data = {"train": "x.parquet", "prompts_per_step": prompts_per_step}
    return make_config(data=data, **sections)


@settings(max_examples=20, deadline=None)
@given(st.integers(4, 40), st.integers(0, 2**31 - 1), st.integers(0, 30))
def test_every_prompt_once_and_the_batch_of_the_step_first(num_prompts: int, seed: int, step: int):
    config = config_of(seed=seed)
    ids = [prompt.prompt_id for prompt in plain_order(dataset(num_prompts, config), seed=seed, step=step)]
    assert ids[:4] == [prompt.prompt_id for prompt in dataset(num_prompts, config).batch(step)]
    assert sorted(ids) == sorted(f"p{index}" for index in range(num_prompts))


def test_refills_differ_by_step_and_seed_and_not_by_what_was_taken():
    # There are 46! orders, so two of twenty are never equal by chance.
    def refills(seed: int, step: int) -> tuple[str, ...]:
        prompts = plain_order(dataset(50, config_of()), seed=seed, step=step)
        return tuple(prompt.prompt_id for prompt in islice(prompts, 4, None))

    assert len({refills(seed, step) for seed in (0, 1) for step in range(10)}) == 20
    assert refills(1, 3) == refills(1, 3)
    # Pinned: a run that is resumed with another version of Lockstep or numpy tries the same prompts.
    assert refills(0, 0)[:6] == ("p22", "p45", "p29", "p12", "p19", "p47")


def test_prompts_within_the_band_and_unknown_ones_come_first():
    rates = {"p0": 1.0, "p1": 0.5, "p2": 0.0, "p3": 0.1, "p4": 0.9, "p6": 0.95}
    prompts = iter([make_prompt(index) for index in range(7)])
    order = by_success_rate(prompts, rates, CurriculumConfig(enabled=True, low=0.1, high=0.9))
    # p5 was never tried; p6 is 0.05 above the band, p0 and p2 0.1 outside it.
    assert [prompt.prompt_id for prompt in order] == ["p1", "p3", "p4", "p5", "p6", "p0", "p2"]


def test_the_curriculum_is_off_unless_asked_for():
    def refuse(step: int, window: int | None) -> dict[str, float]:
        raise AssertionError("not asked for")

    data = dataset(9, config_of())
    expected = list(plain_order(data, seed=0, step=2))
    assert list(prompts_to_try(data, config_of(), 2, refuse)) == expected
    curriculum = {"enabled": True, "window": 5}
    calls = []
    config = config_of(selection={"curriculum": curriculum})
    first = expected[0].prompt_id
    order = prompts_to_try(data, config, 2, lambda *args: calls.append(args) or {first: 0.0})
    assert list(order) == [*expected[1:], expected[0]]
    assert calls == [(2, 5)]


def test_success_rates_are_of_the_steps_before(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.keep_outcomes(0, {"a": (4, 1), "b": (4, 4)})
    ledger.keep_outcomes(1, {"a": (2, 2)})
    ledger.keep_outcomes(2, {"b": (4, 0), "c": (4, 2)})
    ledger.keep_outcomes(1, {"a": (2, 0)})  # collected again after a restart
    assert ledger.success_rates(0, None) == {}
    assert ledger.success_rates(1, None) == {"a": 0.25, "b": 1.0}
    assert ledger.success_rates(3, None) == {"a": 1 / 6, "b": 0.5, "c": 0.5}
    assert ledger.success_rates(3, 2) == {"a": 0.0, "b": 0.0, "c": 0.5}
    assert ledger.success_rates(1, None) == {"a": 0.25, "b": 1.0}
    ledger.keep_outcomes(0, {"b": (2, 1)})
    assert ledger.success_rates(2, None) == {"a": 0.0, "b": 0.5}
    ledger.keep_outcomes(0, {"a": (4, 1), "b": (4, 4)})
    with pytest.raises(ZeroDivisionError), ledger.transaction():
        ledger.keep_outcomes(2, {"c": (1, 1)})
        raise ZeroDivisionError
    ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.success_rates(3, 1) == {"b": 0.0, "c": 0.5}
    ledger.close()


def rule(prompt_id: str, token: int) -> float:
    """Rewards a third of the prompts always, a third never, and the rest at random."""
    return [1.0, 0.0, float(token % 2)][int(prompt_id[1:]) % 3]


def curriculum_config(tmp_path: Path, name: str) -> Config:
    return config_of(
        name=name,
        runs_dir=tmp_path,
        rollout={"completions_per_prompt": 4},
        selection={"curriculum": {"enabled": True}, "dynamic": {"enabled": True}, "over_sampling": {"factor": 1.5}},
    )


def rates(config: Config, step: int) -> dict[str, float]:
    ledger = Ledger(config.run_dir / "ledger.sqlite")
    try:
        return ledger.success_rates(step, None)
    finally:
        ledger.close()


@pytest.mark.parametrize("enabled", [True, False])
async def test_prompts_outside_the_band_are_not_tried_again_while_there_are_others(tmp_path: Path, enabled: bool):
    selection = {"curriculum": {"enabled": enabled}, "dynamic": {"enabled": True}}
    config = config_of(runs_dir=tmp_path, rollout={"completions_per_prompt": 4}, selection=selection)
    async with steps(config, 36, rule) as loop:
        batches = await loop.live(0, 8)
    prompts = [prompt_id for batch in batches.values() for prompt_id in batch["prompt_id"].to_pylist()]
    assert {int(prompt_id[1:]) % 3 for prompt_id in prompts} == {2}
    easy_or_hard = [prompt_id for prompt_id in loop.replica.answered if int(prompt_id[1:]) % 3 < 2]
    assert (len(easy_or_hard) == len(set(easy_or_hard)) > 10) is enabled
    assert rates(config, 12).keys() == (set(loop.replica.answered) if enabled else set())


@pytest.mark.parametrize("lost", [None, 3])
async def test_a_killed_coordinator_goes_on_with_the_same_batches(tmp_path: Path, lost: int | None):
    whole, killed = (curriculum_config(tmp_path, name) for name in ("whole", "killed"))
    async with steps(whole, 36, rule) as loop:
        chance = random.Random(0)
        loop.replica.before_answer = lambda prompt: asyncio.sleep(chance.uniform(0, 0.004))
        expected = await loop.live(0, 6)
        loop.config = killed
        await loop.live(0, 5)
        assert rates(killed, 5) == rates(whole, 5)
        if lost is not None:
            (killed.run_dir / "batches" / f"step-{lost:06d}.parquet").unlink()
        num_answered = len(loop.replica.answered)
        resumed = await loop.live(2, 5)  # from a checkpoint of version 2: batches recorded after it are used again
        assert (len(loop.replica.answered) == num_answered) == (lost is None)
        resumed |= await loop.live(5, 6)
    assert all(resumed[version].equals(expected[version]) for version in range(2, 6))
    for step in range(7):
        assert rates(killed, step) == rates(whole, step)
