"""Tests the errors of `lockstep data reasoning-gym`; tests/reward/environments plays the tasks that it makes."""

import sys

import pytest
from typer.testing import CliRunner

from services.common.errors import InvalidInput
from services.coordinator.cli.main import app


def made(tmp_path, *options: str) -> Exception | None:
    arguments = ["data", "reasoning-gym", "--task", "chain_sum", "--out", str(tmp_path), "--num-rows", "4", *options]
    return CliRunner().invoke(app, arguments).exception


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    error = made(tmp_path)
    assert isinstance(error, InvalidInput)
    assert "lockstep-rl[environments]" in error.message


@pytest.mark.parametrize(("settings", "message"), [("{", "not JSON"), ("[1]", "object")])
def test_settings_are_an_object(tmp_path, settings, message):
    error = made(tmp_path, "--settings", settings)
    assert isinstance(error, InvalidInput)
    assert message in error.message


def test_rows_of_the_real_package(tmp_path):
    pytest.importorskip("reasoning_gym", reason="needs the extra `environments`", exc_type=ImportError)
    pq = pytest.importorskip("pyarrow.parquet")
    assert made(tmp_path, "--num-test", "2", "--settings", '{"min_terms": 2, "max_terms": 2}') is None
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert len(rows) == 4 and pq.read_table(tmp_path / "test.parquet").num_rows == 2
    assert made(tmp_path / "again", "--num-test", "2", "--settings", '{"max_terms": 2, "min_terms": 2}') is None
