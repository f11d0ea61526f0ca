"""Tests that a batch has, row by row, what its groups have."""

import numpy as np
from lockstep.reward.v1.reward_pb2 import Score
from lockstep.types.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Completion, PolicyStamp

from services.common.batches import SAMPLE_SCHEMA
from services.coordinator.data.groups import Episode, ScoredGroup, to_table
from tests.coordinator.fake_services import make_prompt


def group(index: int, tokens: list[list[int]], **fields: object) -> ScoredGroup:
    """Returns a group of which the samples have `tokens`; every second one was cut off."""
    completions = [
        Completion(
            tokens=own,
            logprobs=[-0.5 * token for token in own],
            finish_reason=FINISH_REASON_LENGTH if sample % 2 else FINISH_REASON_STOP,
            seed=2**64 - 1 - sample,
        )
        for sample, own in enumerate(tokens)
    ]
    scores = [Score(reward=0.1 * sample, components={"exact": 0.1 * sample}) for sample in range(len(tokens))]
    stamp = PolicyStamp(version=7, digest="d")
    return ScoredGroup(index, make_prompt(index, index + 1), completions, stamp, scores=scores, scorer="s", **fields)  # type: ignore[arg-type]


def test_a_row_has_its_sample_and_null_where_there_is_nothing() -> None:
    columns = {"ref_logprobs": [np.array([-1, -2, -3], np.float32), np.array([-4], np.float32)]}
    episodes = [Episode([0], [2], [0.25], "e 1"), Episode([], [], [], "e 1")]
    first = group(0, [[1, 2**32 - 1, 3], [9]], columns=columns)
    second = group(4, [[5, 6, 7], [8]], columns=columns, episodes=episodes, sampling_mask=[b"ab", b""], baseline=0.5)
    table = to_table([first, second])
    table.validate(full=True)
    assert table.schema == SAMPLE_SCHEMA
    rows = table.to_pylist()
    assert [row["tokens"] for row in rows] == [[1, 2**32 - 1, 3], [9], [5, 6, 7], [8]]
    assert [row["logprobs"] for row in rows[1:]] == [[-4.5], [-2.5, -3.0, -3.5], [-4.0]]
    assert [row["prompt_tokens"] for row in rows] == [[5]] * 2 + [[5] * 5] * 2
    assert [row["ref_logprobs"] for row in rows] == [[-1, -2, -3], [-4]] * 2
    assert [row["loss_mask"] for row in rows] == [None, None, [True, True, False], [False]]
    assert [row["turn_begins"] for row in rows] == [None, None, [0], []]
    assert [row["turn_rewards"] for row in rows] == [None, None, [0.25], []]
    assert [row["environment"] for row in rows] == [None, None, "e 1", "e 1"]
    assert [row["sampling_mask"] for row in rows] == [None, None, b"ab", b""]
    assert [row["baseline"] for row in rows] == [None, None, 0.5, 0.5]
    assert [row["seed"] for row in rows] == [2**64 - 1, 2**64 - 2] * 2
    assert [(row["reward"], row["components"]) for row in rows] == [
        (0.0, [("exact", 0.0)]),
        (0.1, [("exact", 0.1)]),
    ] * 2
    of_no_one = [row["values"] or row["calls"] or row["segment"] or row["routed_experts"] for row in rows]
    assert of_no_one == [None] * 4


def test_truncated_samples_are_masked_and_the_others_are_not() -> None:
    table = to_table([group(0, [[1, 2], [3, 4]])], mask_truncated=True)
    assert table["loss_mask"].to_pylist() == [[True, True], [False, False]]


def test_no_groups_are_an_empty_batch() -> None:
    assert to_table([]).schema == SAMPLE_SCHEMA
    assert len(to_table([])) == 0


def test_a_row_without_an_environment_has_no_episode() -> None:
    names = ("turn_begins", "turn_ends", "turn_rewards", "environment")
    assert Episode.of(dict.fromkeys(names)) is None
    row = {"turn_begins": [0, 3], "turn_ends": [1, 5], "turn_rewards": [0.0, 1.0], "environment": "e"}
    episode = Episode.of({**row, "reward": 3.0})
    assert episode is not None
    assert episode.loss_mask(5).tolist() == [True, False, False, True, True]
    assert episode.turns([1, 2, 3, 4, 5]) == [[1], [4, 5]]
