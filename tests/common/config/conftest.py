"""A file with the smallest config."""

from pathlib import Path

import pytest
import yaml

from tests.common.config.smallest import SMALLEST


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    return str(path)
