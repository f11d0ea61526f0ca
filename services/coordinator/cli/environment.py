"""Implements `lockstep env try`, which plays an episode of a run's environment without a model."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from services.common.errors import InvalidInput
from services.coordinator.observe.console import literal_console

_console = literal_console()


def app() -> typer.Typer:
    """Returns the command `try`."""
    commands = typer.Typer(no_args_is_help=True, help="Play a run's environment without a model.")
    commands.callback()(lambda: None)  # typer would make the only command the group itself
    commands.command("try")(play)
    return commands


def play(
    config: Annotated[list[str], typer.Argument(help="YAML files and key=value overrides; later ones win.")],
    row: Annotated[
        int, typer.Option(min=0, help="Row of the training data, counted from 0: 17 for prompt 17-9f2c41d0.")
    ] = 0,
    policy_text: Annotated[
        list[str] | None, typer.Option(help="A turn of the policy; repeat it for more. Otherwise you are asked.")
    ] = None,
    replies: Annotated[
        Path | None, typer.Option(help="File with a turn in each line; a line may be JSON text, for line breaks.")
    ] = None,
) -> None:
    """Play one row: show the messages, take the policy's turns from you, and show replies, rewards and the end.

    The exit code is 1 if the environment fails.
    """
    from services.common.config.reading.load import load
    from services.common.config.run import Config
    from services.coordinator.checks.play import play_row

    settings = load(Config, config)
    texts = [*(policy_text or []), *(_lines(replies) if replies else [])]
    is_well = asyncio.run(play_row(settings, row, iter(texts) if policy_text or replies else _asked(), _console))
    raise typer.Exit(0 if is_well else 1)


def _asked() -> Iterator[str]:
    """Yields the lines that are typed, until the end of input."""
    while True:
        try:
            yield _console.input("policy> ")
        except EOFError:
            return


def _lines(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--replies: {path} cannot be read: {error}", field="replies") from error
    for line in lines:
        try:
            text = json.loads(line)
        except ValueError:
            text = line
        yield text if isinstance(text, str) else line
