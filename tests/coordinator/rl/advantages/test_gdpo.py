"""Tests gdpo, which compares each reward component before it adds them, and the configs that it refuses."""

import contextlib
import statistics
import warnings

import pytest

from services.common.config.advantage import AdvantageConfig
from services.common.config.load import load
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.coordinator.rl.advantages import compute_advantages
from tests.coordinator.rl.advantages.harness import computed, row, table
from tests.support import raises

AB = {"a": 1.0, "b": 1.0}
FIXED = ["model=m", "data={train: a.parquet, prompts_per_step: 4}", "reward.scorers=[{kind: exact}]"]


def test_gdpo_compares_each_component_before_it_adds_them():
    weights = {"correct": 2.0, "format": 1.0}
    rows = [row(0, components=[("correct", c), ("format", f)]) for c, f in ((1, 10), (1, 0), (0, 10), (0, 12))]
    rows += [row(0, group=1, components=[("correct", c), ("format", 3)]) for c in (1, 1)]  # nothing to compare
    by_hand = [
        2 * (c - 0.5) / statistics.stdev([1, 1, 0, 0]) + (f - 8) / statistics.stdev([10, 0, 10, 12])
        for c, f in ((1, 10), (1, 0), (0, 10), (0, 12))
    ] + [0, 0]
    scale = statistics.stdev(by_hand)
    found = [numbers[0] for numbers in computed(rows, kind="gdpo", components=weights)]
    assert found == pytest.approx([number / scale for number in by_hand], abs=1e-5)  # the eps beside stds of about 1


def test_gdpo_with_equal_components_teaches_exactly_nothing():
    rows = [row(index, components=[("a", 0.7)]) for index in range(3)]
    assert computed(rows, kind="gdpo", components={"a": 1.0}) == [[0], [0], [0]]


def test_gdpo_refuses_a_sample_without_a_component():
    with raises(InvalidInput, field="components"):
        computed([row(0, components=[("a", 1), ("b", 2)]), row(0, components=[("a", 0)])], kind="gdpo", components=AB)


def test_gdpo_computes_a_batch_without_samples():
    empty = table([row(0, components=[("a", 1)])]).slice(0, 0)
    with warnings.catch_warnings(action="error"):
        assert compute_advantages(empty, AdvantageConfig(kind="gdpo", components=AB)).num_rows == 0


@pytest.mark.parametrize(
    ("scorers", "components", "message"),
    [
        ("[{kind: exact}]", "{format: 1}", "components.format is not one of reward.scorers: exact"),
        ("[{kind: exact, weight: 0}]", "{exact: 1}", "components.exact: a sample that a scorer of weight 0"),
        ("[{kind: exact}]", "{exact: true}", "must be a number, not True"),
        ("[{kind: exact}]", "{exact: 1}", ""),
    ],
)
def test_gdpo_names_a_component_that_a_sample_may_lack(scorers: str, components: str, message: str):
    fixed = ["model=m", "data={train: a.parquet, prompts_per_step: 4}", f"reward.scorers={scorers}"]
    with pytest.raises(InvalidInput, match=message) if message else contextlib.nullcontext():
        load(Config, [*fixed, f"advantage={{kind: gdpo, components: {components}}}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.on_failure=zero", "set drop_group or fail"),
        ("selection.dynamic.enabled=true", "set selection.dynamic.component"),
        ("selection.dynamic={enabled: true, component: exact}", ""),
    ],
)
def test_gdpo_compares_components_and_no_sums(override: str, message: str):
    with pytest.raises(InvalidInput, match=message) if message else contextlib.nullcontext():
        load(Config, [*FIXED, "advantage={kind: gdpo, components: {exact: 1}}", override])
