"""Fixtures of the tests of agents."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch  # noqa: F401 before transformers, which is imported without it otherwise, and other tests need both

from tests.agents.harness import ASK


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., dict[str, object]]:
    def make(source: str, *args: str, **settings: object) -> dict[str, object]:
        (tmp_path / "agent.py").write_text(ASK + source)
        files = {"agent.py": str(tmp_path / "agent.py")}
        return {"command": ["python", "-S", "agent.py", *args], "files": files, **settings}

    return make
