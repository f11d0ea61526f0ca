"""The pages agree with the repository: README.md quotes the loop as it is, and every file that a page names exists."""

import re
from pathlib import Path

import pytest

from tests.support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOM = re.compile(r"\b(?:services|protos|tests|deploy|benchmarks|requirements)/[\w./*<>-]*[\w*]")
RESULTS = re.compile(r"`((?:algorithm|dataplane|experts|learn|loop|megatron|rollout|step|sync|train)\b[\w.*-]*\.json)`")


def missing_files(text: str) -> set[str]:
    """Returns the paths and result files named in `text` that do not exist; `*` and `<name>` match anything."""
    named = {*ROOM.findall(text), *(f"benchmarks/results/{name}" for name in RESULTS.findall(text))}
    return {name for name in named if not any(ROOT.glob(re.sub(r"<\w+>", "*", name)))}


def test_the_readme_quotes_the_loop() -> None:
    quoted = re.search(r"```python\n(while .*?)```", PAGES[0].read_text(encoding="utf-8"), re.DOTALL)
    assert quoted
    loop = (ROOT / "services" / "coordinator" / "rl" / "loop.py").read_text(encoding="utf-8")
    assert "".join(f"    {line}" for line in quoted[1].splitlines(keepends=True)) in loop


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert not missing_files(page.read_text(encoding="utf-8"))


def test_a_missing_file_is_found() -> None:
    text = "services/common/errors.py, services/nowhere.py, `loop.json`, `loop-lost.json`, deploy/<service>.Dockerfile"
    assert missing_files(text) == {"services/nowhere.py", "benchmarks/results/loop-lost.json"}
