"""The undisturbed run that disturbed ones are compared with."""

from pathlib import Path

import pytest

from tests.e2e.lockstep_command import reference


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory.getbasetemp())
