"""Tests that a user's own estimator is called like the built-in kinds, and that its errors are reported."""

import pytest
from pydantic import ValidationError

from services.common.config.advantage import AdvantageConfig
from services.common.errors import InvalidInput
from services.coordinator.rl.advantages import require_importable
from tests.coordinator.rl.advantages.harness import computed, row
from tests.support import raises


def test_its_numbers_are_the_advantages() -> None:
    rows = [row(0.5, 2), row(0.1), row(0.9)]
    config = {"kind": "python", "import_path": "tests.user_functions:ranks", "kwargs": {"scale": 4.0}}
    assert computed(rows, **config) == [[0.0, 0.0], [-2.0], [2.0]]


def test_what_is_not_finite_is_named() -> None:
    with pytest.raises(
        InvalidInput, match=r"not_finite returned .* one finite number for each of the 1 trained tokens"
    ):
        computed([row(1)], kind="python", import_path="tests.user_functions:not_finite")


def test_a_function_that_raises_is_named_with_its_line() -> None:
    with pytest.raises(InvalidInput, match=r"import_path: .*:raises raised KeyError: 'column' \(.*, line \d+"):
        computed([row(1)], kind="python", import_path="tests.user_functions:raises")


def test_what_cannot_be_imported_is_refused_before_a_run() -> None:
    config = AdvantageConfig(kind="python", import_path="tests.user_functions:no_such")
    with raises(InvalidInput, field="advantage.import_path"):
        require_importable(config)
    config = AdvantageConfig(kind="python", import_path="tests.user_functions:ranks", kwargs={"scalee": 4.0})
    with pytest.raises(InvalidInput, match=r"import_path: .*ranks is called with \(samples, config, scalee=\.\.\.\)"):
        require_importable(config)


def test_its_path_is_required_and_read_by_no_other_kind() -> None:
    with pytest.raises(ValidationError, match="kind python needs import_path"):
        AdvantageConfig(kind="python")
    with pytest.raises(ValidationError, match="import_path is not read by kind grpo"):
        AdvantageConfig(import_path="a:b")
