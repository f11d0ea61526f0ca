"""Tests that samples whose columns contradict each other are refused, with the column and the row."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches import SAMPLE_SCHEMA
from services.common.errors import InvalidInput
from services.coordinator.data.groups import Episode
from services.trainer.samples import check_groups, check_samples
from tests.support import VOCAB, make_batch

NAN, INF = math.nan, math.inf
ROW = 5  # of the group 1, as sample 2
Rows = list[dict[str, Any]]


def good_rows() -> Rows:
    """Returns samples that have every list that a sample can have, of an environment with two turns."""
    rows = make_batch(4, 3, PolicyStamp(version=0, digest="0" * 32)).to_pylist()
    for row in rows:
        if len(row["tokens"]) < 6:
            row["tokens"] += [2] * 6
        num_tokens = len(row["tokens"])
        row |= {name: [-1.0] * num_tokens for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns")}
        episode = Episode([0, 4], [2, num_tokens], [0.5, 0.0], "test 1")
        row |= dataclasses.asdict(episode) | {"loss_mask": episode.loss_mask(num_tokens).tolist()}
        row |= {"components": [("a", 1.0)], "baseline": 0.5}
    return rows


def table(rows: Rows) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


def check(rows: Rows) -> None:
    check_samples(table(rows), vocab_size=VOCAB, routed_experts=None)
    check_groups(table(rows))


def put(**values: Any) -> Callable[[Rows], object]:
    """Returns a function that sets these values in ROW."""
    return lambda rows: rows[ROW].update(values)


def put_at(name: str, *values: Any) -> dict[str, Callable[[Rows], object]]:
    """Returns for each value a function that puts it at the second place of ROW's list `name`."""

    def put_one(rows: Rows, value: Any) -> None:
        rows[ROW][name][1] = value

    return {f"{name} {value}": lambda rows, value=value: put_one(rows, value) for value in values}


CONTRADICTIONS: dict[str, Callable[[Rows], object]] = {
    **put_at("prompt_tokens", VOCAB, 2**32 - 1, None),
    **put_at("tokens", VOCAB, 2**32 - 1, None),
    **put_at("logprobs", 0.7, 0.01, -1e30, NAN, INF, -INF, None),
    **put_at("ref_logprobs", 0.7, 0.01, -1e30, NAN, INF, -INF, None),
    **{case: f for name in ("values", "advantages", "returns") for case, f in put_at(name, 1e30, -1e30, NAN).items()},
    **{case: f for name in ("values", "advantages", "returns") for case, f in put_at(name, INF, None, 1e10).items()},
    **put_at("loss_mask", None),
    **put_at("turn_rewards", NAN, -INF, None),
    **put_at("turn_begins", 1, -1, 10**6, None),
    **put_at("turn_ends", 3, -1, 10**6, None),
    **{f"reward {value}": put(reward=value) for value in (NAN, INF, -INF, None)},
    **{f"baseline {value}": put(baseline=value) for value in (NAN, INF)},
    **{f"components {value}": put(components=[("a", 1.0), ("b", value)]) for value in (NAN, INF, None)},
    **{f"group {value}": put(group=value) for value in (-5, -(2**31), None)},
    **{f"sample {value}": put(sample=value) for value in (-1, None)},
    "group is that of another prompt": put(group=0, sample=7),
    "group is new, of the same prompt": put(group=9),
    "sample is there twice": put(sample=1),
    "prompt_id is another": put(prompt_id="other"),
    "prompt_id is that of another group": put(prompt_id="p3"),
    "prompt_tokens are shorter": lambda rows: rows[ROW]["prompt_tokens"].pop(),
    "prompt_tokens are longer": lambda rows: rows[ROW]["prompt_tokens"].append(2),
    "prompt_tokens are others": lambda rows: rows[ROW].update(prompt_tokens=[1] * len(rows[ROW]["prompt_tokens"])),
    "prompt_tokens are empty": put(prompt_tokens=[]),
    "tokens are empty": put(tokens=[]),
    "loss_mask trains on the environment": lambda rows: rows[ROW]["loss_mask"].__setitem__(3, True),
    "loss_mask is absent, with an environment": lambda rows: [row.update(loss_mask=None) for row in rows],
    "turn_begins are absent": put(turn_begins=None),
    **{f"{name} is absent": put(**{name: None}) for name in ("turn_ends", "turn_rewards", "environment")},
    **{f"{name} is shorter": put(**{name: [0]}) for name in ("turn_ends", "turn_rewards")},
    **{
        f"{name} is {how}": change
        for name in ("logprobs", "loss_mask", "ref_logprobs", "values", "advantages", "returns")
        for how, change in {
            "longer": lambda rows, name=name: rows[ROW][name].append(rows[ROW][name][0]),
            "shorter": lambda rows, name=name: rows[ROW][name].pop(),
            "empty": put(**{name: []}),
            "absent": put(**{name: None}),
        }.items()
    },
    **{
        f"{name} is null": put(**{name: None})
        for name in ("prompt_id", "prompt_tokens", "tokens", "finish_reason", "policy_version", "policy_digest")
    },
    **{f"{name} is null": put(**{name: None}) for name in ("components", "scorer", "seed")},
}
# A contradiction of two columns is found in the other one.
OTHER_COLUMN = {
    "group is that of another prompt": "prompt_id",
    "turn_begins are absent": "turn_ends",
    "turn_begins 1000000": "turn_ends",
}


def test_good_samples_are_accepted() -> None:
    check(good_rows())
    check(good_rows()[::-1])  # the order of groups and samples is free
    highest = good_rows()
    for row in highest:
        row["logprobs"][0], row["advantages"][0], row["group"] = 1e-4, 1e9, row["group"] + 10**6
    check(highest)
    check_samples(make_batch(4, 3, PolicyStamp(version=0, digest="0" * 32)), vocab_size=VOCAB, routed_experts=None)


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_is_refused_by_column_and_row(case: str) -> None:
    rows = good_rows()
    CONTRADICTIONS[case](rows)
    with pytest.raises(InvalidInput) as caught:
        check(rows)
    column = OTHER_COLUMN.get(case, case.split()[0])
    assert caught.value.metadata["field"] == column
    row = 0 if case == "loss_mask is absent, with an environment" else ROW
    assert f"{column}: row {row} " in caught.value.message


@settings(deadline=None)
@given(
    st.sampled_from(["logprobs", "ref_logprobs", "values", "advantages", "returns", "turn_rewards", "reward"]),
    st.integers(0, 11),
    st.floats(),
)
@example("logprobs", 0, 1e-3)
def test_only_numbers_that_a_column_can_have_are_accepted(name: str, row: int, value: float) -> None:
    rows = good_rows()
    if name == "reward":
        rows[row][name] = value
    else:
        rows[row][name][-1] = value
    kind = np.float64 if name in ("reward", "turn_rewards") else np.float32
    limits = {"logprobs": (-2e6, 1e-3), "ref_logprobs": (-2e6, 1e-3)}
    with np.errstate(over="ignore"):  # numbers and limits as the column has them: 1e-3 is a little larger in float32
        stored, low, high = map(kind, (value, *limits.get(name, (-INF, INF) if "reward" in name else (-1e9, 1e9))))
    try:
        check(rows)
        is_accepted = True
    except InvalidInput as error:
        is_accepted = False
        assert error.message.startswith(f"{name}: row {row} has ")
    assert is_accepted == (math.isfinite(stored) and low <= stored <= high)


def test_a_contradiction_is_found_in_samples_that_arrived_in_several_frames() -> None:
    rows = good_rows()
    rows[ROW]["reward"] = NAN
    parts = pa.concat_tables([table(rows[:2]), table(rows[2:7]).slice(1), table(rows[7:])])
    with pytest.raises(InvalidInput, match=f"reward: row {ROW - 1} has nan"):
        check_samples(parts, vocab_size=VOCAB, routed_experts=None)
