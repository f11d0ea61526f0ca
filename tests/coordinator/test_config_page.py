"""docs/configuration.md."""

from pathlib import Path

from services.coordinator.config_page import config_page


def test_the_page_is_that_of_the_code() -> None:
    written = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert written.read_text() == config_page(), "run: lockstep config --markdown > docs/configuration.md"
