"""Tests docs/configuration.md and the output of `lockstep config`."""

import io

import pytest
from rich.console import Console

from services.common.config.load import keys
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.coordinator.cli.config import config_page, keys_with_prefix, show_keys
from tests.support import ROOT

KEYS = list(keys(Config))


def shown(width: int, *, is_terminal: bool) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
    show_keys(KEYS, console)
    return console.file.getvalue().splitlines()


def test_the_page_is_that_of_the_code() -> None:
    written = ROOT / "docs" / "configuration.md"
    assert written.read_text() == config_page(), "run: lockstep config --markdown > docs/configuration.md"


def test_types_are_shown_without_the_internals_of_their_limits() -> None:
    types = {key.path: key.type for key in KEYS}
    assert types["trainer.optim.betas"] == "tuple[float, float]"
    assert types["rollout.sampling.stop"] == "tuple[str, ...]"
    assert [path for path, name in types.items() if "Annotated" in name or "FieldInfo" in name] == []


def test_every_key_is_whole_in_a_narrow_terminal() -> None:
    lines = shown(80, is_terminal=True)
    assert max(map(len, lines)) <= 80
    assert [f"{key.path} = {key.default}" for key in KEYS] == [line for line in lines if not line.startswith(" ")]
    words = {word for line in lines for word in line.split()}
    assert {word for key in KEYS for word in key.help.split()} <= words


def test_a_pipe_has_a_line_for_each_key() -> None:
    assert [line.split("\t") for line in shown(80, is_terminal=False)] == [
        [key.path, key.type, key.default, key.help] for key in KEYS
    ]


@pytest.mark.parametrize("prefix", ["trainer.megatron", "trainer.megatron.moe."])
def test_keys_of_a_section(prefix: str) -> None:
    found = {key.path for key in keys_with_prefix(prefix, KEYS)}
    assert "trainer.megatron.moe.freeze_router" in found and len(found) < len(KEYS)
    assert all(path.startswith(prefix) for path in found)


@pytest.mark.parametrize(
    ("prefix", "advice"),
    [
        ("trainer.optm", r"no key begins with trainer\.optm; did you mean trainer\.optim\?"),
        ("lr", r"did you mean trainer\.optim\.lr\?"),
        ("zzzz", "`lockstep config` lists every key"),
    ],
)
def test_a_section_that_is_not_there(prefix: str, advice: str) -> None:
    with pytest.raises(InvalidInput, match=advice):
        keys_with_prefix(prefix, KEYS)
