"""Directories with the config.json of a small model."""

from pathlib import Path

import pytest

from tests.coordinator.planning.small_models import DENSE, MOE, write


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write(tmp_path / "dense", DENSE)


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write(tmp_path / "moe", MOE)
