"""Tests that the pages agree with the repository, for example that files that a page names exist, and how they look."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.models import table
from services.coordinator.cli.main import app
from tests.support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MANUAL = [page for page in PAGES if page.name != "CONTRIBUTING.md"]
ROOM = re.compile(r"\b(?:services|docs|protos|tests|deploy|benchmarks|requirements)/[\w./*<>-]*[\w*]")
_KINDS = (
    "algorithm|colocated|dataplane|experts|first|fp8|learn|loop|megatron|peers|real|restarts|rollout|step|sync|train"
)
RESULTS = re.compile(rf"`((?:{_KINDS})\b[\w.*-]*\.json)`")


def missing_files(text: str) -> set[str]:
    """Returns the paths and result files named in `text` that do not exist; `*` and `<name>` match anything."""
    named = {*ROOM.findall(text), *(f"benchmarks/results/{name}" for name in RESULTS.findall(text))}
    return {name for name in named if not any(ROOT.glob(re.sub(r"<\w+>", "*", name)))}


def test_a_page_quotes_the_loop() -> None:
    concepts = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    quoted = re.search(r"```python\n(while .*?)```", concepts, re.DOTALL)
    assert quoted
    loop = (ROOT / "services" / "coordinator" / "rl" / "loop.py").read_text(encoding="utf-8")
    assert "".join(quoted[1].split()) in "".join(loop.split())


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_a_page_shows_the_output_of_a_run(page: str) -> None:
    shown = re.search(r"```\n\$ make run\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert shown
    whole = iter((ROOT / "benchmarks" / "results" / "quickstart.log").read_text(encoding="utf-8").splitlines())
    assert [line for line in shown[1].splitlines() if line not in whole] == []  # in the order of the file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert not missing_files(page.read_text(encoding="utf-8"))


def test_every_frame_that_the_design_names_exists() -> None:
    frames = re.findall(r"`(services/\S+\.py): ([\w.]+)", (ROOT / "docs" / "design.md").read_text(encoding="utf-8"))
    assert len(frames) > 40
    for file, names in frames:
        source = (ROOT / file).read_text(encoding="utf-8")
        for name in names.split("."):
            assert re.search(rf"^\s*((async )?def |class ){name}\b|^\s*{name}: ", source, re.MULTILINE), (file, name)


def complete_configs() -> Iterator[tuple[str, str]]:
    """Yields the page and text of each YAML block that has a name, and is thus a whole config of a run."""
    for page in PAGES:
        for block in re.findall(r"```yaml\n(name: .*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            yield page.name, block


@pytest.mark.parametrize(("page", "block"), complete_configs())
def test_plan_accepts_every_complete_config(tmp_path: Path, page: str, block: str) -> None:
    (tmp_path / "run.yaml").write_text(block, encoding="utf-8")
    model = f"model={ROOT / 'deploy' / 'quickstart' / 'model'}"
    planned = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml"), model, "--device", "gpu"])
    assert planned.exit_code == 0, (page, planned.exception)


def test_complete_configs_are_found() -> None:
    assert sorted(page for page, _ in complete_configs()) == ["README.md", *["migration.md"] * 4, "own.md"]


def test_every_page_is_in_the_manual() -> None:
    manual = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f": {page.name}\n" in manual for page in (ROOT / "docs").glob("*.md"))


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").split()) <= 1200


def wide_lines(text: str) -> list[str]:
    """Returns the lines of code blocks that do not fit beside the manual's lists of pages and sections."""
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if len(line) > 88]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_both_sides_of_a_conflict(page: Path) -> None:
    assert not re.search("^(<{7}|>{7}) ", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", MANUAL, ids=lambda page: page.name)
def test_no_code_is_too_wide(page: Path) -> None:
    assert wide_lines(page.read_text(encoding="utf-8")) == []


def test_wide_code_is_found() -> None:
    assert wide_lines(f"{'a' * 99}\n```sh\n{'b' * 88}\n```\n1. x\n    ```\n    {'c' * 85}\n    ```\n") == [
        f"    {'c' * 85}"
    ]


def test_the_manual_loads_nothing_from_other_hosts() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "\n  font: false" in settings
    assert not re.search(r"\brepo_url|http", settings)  # the theme asks a repository's host for its stars
    loads = re.compile(r"!\[[^]]*]\(\s*(?:https?:)?//|<(?:img|script|link|iframe)\b|```mermaid|@import|url\(")
    style = (ROOT / "docs" / "stylesheets" / "manual.css").read_text(encoding="utf-8")
    assert [page.name for page in MANUAL if loads.search(page.read_text(encoding="utf-8"))] == []
    assert not loads.search(style)


def test_a_missing_file_is_found() -> None:
    text = "services/common/errors.py, services/nowhere.py, `loop.json`, `loop-lost.json`, deploy/<service>.Dockerfile"
    assert missing_files(text) == {"services/nowhere.py", "benchmarks/results/loop-lost.json"}


def test_the_table_of_models_is_the_measured_one() -> None:
    results = ROOT / "benchmarks" / "results"
    models, engine = (json.loads((results / f"{name}.json").read_text()) for name in ("models", "models-with-engine"))
    assert table(models, engine) in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
