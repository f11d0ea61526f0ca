"""Tests that verify knows the order of a step's prompts as the data has it, also of those that filled up the step."""

from itertools import islice
from pathlib import Path

import pytest

from services.coordinator.data.prompts import plain_order
from services.coordinator.verify.samples import SampleChecks
from tests.coordinator.fake_services import make_config
from tests.coordinator.fake_steps import dataset

NUM_PROMPTS, PER_STEP = 20, 4


@pytest.mark.parametrize("num_tried", [PER_STEP, PER_STEP + 1, NUM_PROMPTS])
def test_the_prompts_that_a_step_tries_are_compared(num_tried: int) -> None:
    config = make_config(data={"train": "x.parquet", "prompts_per_step": PER_STEP})
    data, content, checks = dataset(NUM_PROMPTS, config), config.model_dump(mode="json"), SampleChecks()

    def found(step: int, **changed: str) -> list[str]:
        tried = islice(plain_order(data, seed=config.seed, step=step), num_tried)
        rows = [{"group": group, "prompt_id": prompt.prompt_id} for group, prompt in enumerate(tried)]
        rows[-1] |= changed
        body = {"num_prompts": NUM_PROMPTS}
        return list(checks._check_order(rows, step, body, content, Path("batch")))

    assert [found(step) for step in range(12)] == [[]] * 12
    (wrong,) = found(0, prompt_id="other")
    assert wrong.startswith("batch has prompt other where the order of the data has p")
