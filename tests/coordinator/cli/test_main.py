"""Tests what the command says about itself."""

from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from services.common.errors import InvalidInput, NotFound
from services.coordinator.cli import main
from services.coordinator.cli.main import app


def test_the_version_is_that_of_the_package() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"lockstep {version('lockstep-rl')}\n")


def test_without_a_command_it_lists_the_commands() -> None:
    shown = CliRunner().invoke(app, [])
    assert "Train language models" in shown.output
    assert all(command in shown.output for command in ("run", "sft", "eval", "replay", "doctor", "plan", "config"))


@pytest.mark.parametrize("command", [["status"], ["replicas", "list", "my-run"]])
def test_the_daemons_address_may_be_in_the_environment(command: list[str]) -> None:
    asked = CliRunner().invoke(app, command, env={"LOCKSTEP_COORDINATOR": "nowhere"})
    assert isinstance(asked.exception, InvalidInput) and "'nowhere' is not HOST:PORT" in str(asked.exception)


def test_replicas_of_a_name_without_a_coordinator_are_not_looked_for() -> None:
    asked = CliRunner().invoke(app, ["replicas", "list", "my-run"], env={"LOCKSTEP_COORDINATOR": ""})
    assert isinstance(asked.exception, NotFound) and "my-run is no directory here" in str(asked.exception)


def test_the_shell_completes_commands() -> None:
    typed = {"_LOCKSTEP_COMPLETE": "complete_bash", "COMP_WORDS": "lockstep re", "COMP_CWORD": "1"}
    shown = CliRunner().invoke(app, [], prog_name="lockstep", env=typed)
    assert shown.output.split() == ["report", "replay", "replicas"]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_host_without_memory_is_a_reason_and_no_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith("lockstep: error: OUT_OF_MEMORY: ")


def test_another_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(RuntimeError, match="a mistake"):
        main.main()
