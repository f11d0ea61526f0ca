"""Tests that a batch's order follows from its content alone, and that its first groups are known early."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep.reward.v1.reward_pb2 import Score
from lockstep.types.v1.types_pb2 import Completion, PolicyStamp

from services.common.config.streaming import orders_by_length
from services.coordinator.data.groups import ScoredGroup
from services.coordinator.rl.blocks import ByLength, ByPrompt, by_length
from tests.common.config.test_streaming import config
from tests.coordinator.fake_services import make_prompt


def group(index: int, *lengths: int) -> ScoredGroup:
    completions = [Completion(tokens=[4] * length, logprobs=[-1.0] * length) for length in lengths]
    return ScoredGroup(index, make_prompt(index), completions, PolicyStamp(), [Score()] * len(lengths), "s")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=24), st.integers(0, 5), st.randoms())
@settings(max_examples=100, deadline=None)
def test_groups_come_in_the_order_of_length_whenever_they_begin(
    lengths: list[int], most_late: int, random: random.Random
) -> None:
    """Samples begin up to `most_late` steps late, and their lengths are told only when another group is finished."""
    known: dict[str, int] = {}
    order = ByLength(len(lengths), known)
    groups = [group(index, 1, length) for index, length in enumerate(lengths)]
    begins = [random.randint(0, most_late) for _ in lengths]
    for one in groups:
        order.begin(one.index, one.prompt.prompt_id)
    certain: list[ScoredGroup] = []
    for now in range(max(lengths) + most_late + 1):
        for one, begin in zip(groups, begins, strict=True):
            if begin + one.length != now:
                continue
            for other, other_begin in zip(groups, begins, strict=True):
                known[other.prompt.prompt_id] = min(other.length, max(0, now - other_begin))
            certain += order.decide(one.index, one if one.index % 7 else None)
    assert certain == sorted((one for one in groups if one.index % 7), key=by_length)


def test_a_group_is_certain_once_all_others_are_longer() -> None:
    known: dict[str, int] = {}
    order = ByLength(3, known)
    for index in (0, 1):
        order.begin(index, f"p{index}")
    known.update(p0=9, p1=2)
    assert order.decide(1, group(1, 2)) == []  # the third one has not begun
    order.begin(2, "p2")
    known["p2"] = 5
    assert [one.index for one in order.decide(0, group(0, 9))] == [1]
    assert [one.index for one in order.decide(2, group(2, 7))] == [2, 0]


def test_equally_long_groups_are_in_the_order_of_prompts() -> None:
    order = ByLength(3, {"p0": 4, "p1": 4, "p2": 4})
    for index in range(3):
        order.begin(index, f"p{index}")
    assert order.decide(2, group(2, 4)) == order.decide(1, group(1, 4)) == []
    assert [one.index for one in order.decide(0, group(0, 4))] == [0, 1, 2]


def test_prompts_that_wait_for_one_that_was_dropped() -> None:
    order = ByPrompt()
    assert order.decide(1, group(1, 1)) == []
    assert [one.index for one in order.decide(0, None)] == [1]


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "all samples at once": (True, {}),
    "on two replicas": (True, {"rollout": {"num_replicas": 2, "max_samples": 32}}),
    "some samples wait for others": (False, {"rollout": {"max_samples": 63}}),
    "no blocks": (False, {"trainer": {"num_epochs": 2}}),
    "lengths would choose the mini-batch": (False, {"trainer": {"num_minibatches": 2}}),
    "which groups are trained on is open": (False, {"selection": {"dynamic": {"enabled": True}}}),
    "some groups are not trained on": (False, {"selection": {"over_sampling": {"factor": 1.5}}}),
    "greedy completions too": (False, {"advantage": {"kind": "remax"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_which_runs_order_by_length(case: str) -> None:
    expected, changes = CASES[case]
    assert orders_by_length(config(**changes)) is expected
