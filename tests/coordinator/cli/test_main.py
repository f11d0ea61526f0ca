"""Tests what the command says about itself."""

import asyncio
import errno
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.common.errors import InvalidInput, NotFound
from services.common.rpc.tls import Role
from services.coordinator.cli import main
from services.coordinator.cli.main import app
from tests.common.rpc.tls_harness import Certificates, serve
from tests.support import PATIENCE_S


def test_the_version_is_that_of_the_package() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"lockstep {version('lockstep-rl')}\n")


def test_without_a_command_it_lists_the_commands() -> None:
    shown = CliRunner().invoke(app, [])
    assert "Train language models" in shown.output
    assert all(command in shown.output for command in ("run", "sft", "eval", "replay", "doctor", "plan", "config"))


def test_help_and_completion_import_nothing_heavy() -> None:
    heavy = {"cryptography", "numpy", "pyarrow", "pydantic", "torch", "transformers"}
    assert not heavy & imported_by("import services.coordinator.cli.main")


def test_the_list_of_config_keys_imports_nothing_that_reads_models_or_data() -> None:
    heavy = {"jinja2", "pyarrow", "tokenizers", "torch", "transformers"}
    lists_keys = "from services.coordinator.cli.main import app; app(['config'], standalone_mode=False)"
    assert not heavy & imported_by(lists_keys)


def imported_by(code: str) -> set[str]:
    shown = f"{code}; import sys; sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


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


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["export", "--out", "out"], "model"),
        (["eval"], "model"),
        (["eval", "model=MODEL"], "data.eval.test"),
        (["eval", "--trainer", "127.0.0.1:1"], "data.eval.test"),
    ],
)
def test_a_runs_own_config_is_relative_to_where_it_was_started(
    arguments: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (tmp_path / "runs" / "run" / "ledger.sqlite").touch()
    data = {"train": "a.jsonl", "eval": {"test": "b.jsonl", "all": "*.jsonl"}, "prompts_per_step": 1}
    own = tmp_path / "runs" / "run" / "config.json"
    own.write_text(json.dumps({"model": "my/model", "data": data, "reward": {"scorers": [{"kind": "exact"}]}}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    command, *rest = [one.replace("MODEL", str(tmp_path)) for one in arguments]
    error = CliRunner().invoke(app, [command, str(checkpoint), *rest]).exception
    path = "my/model" if key == "model" else "b.jsonl"
    words = f"{key}: {path} does not exist here: {own} has it relative to the directory in which the run was started"
    assert isinstance(error, NotFound) and words in str(error) and f"add {key}=PATH" in str(error)


def test_an_export_to_what_exists_is_refused_before_a_checkpoint_is_looked_at(tmp_path: Path) -> None:
    asked = CliRunner().invoke(app, ["export", str(tmp_path / "nowhere"), "--out", str(tmp_path)])
    assert isinstance(asked.exception, InvalidInput)
    assert f"--out: {tmp_path} exists; choose another" in str(asked.exception)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "OUT_OF_MEMORY: "),
        (RuntimeError("can't start new thread"), "OUT_OF_MEMORY: "),
        (OSError(errno.ENOSPC, "full", "/a"), "STORAGE_FAILED: /a cannot be written: full; free space on"),
        (OSError(errno.EACCES, "denied", "/a"), "STORAGE_FAILED: /a cannot be opened: denied; give this user access"),
    ],
)
def test_an_error_of_the_host_is_a_reason_and_no_traceback(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith(f"lockstep: error: {line}")


def test_another_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(RuntimeError, match="a mistake"):
        main.main()


def test_only_a_coordinator_runs_here(tmp_path: Path) -> None:
    """Tests that an operator's certificate, which is for --coordinator, is refused before anything is made."""
    tls = Certificates(tmp_path / "certificates").of(Role.OPERATOR)
    started = CliRunner().invoke(app, ["run", "nothing.yaml", "--tls", str(tls)])
    words = "is for the role operator, but must be for coordinator here; issue one with `lockstep certs issue coord"
    assert isinstance(started.exception, InvalidInput) and words in str(started.exception)
    sent = CliRunner().invoke(app, ["run", "nothing.yaml", "--tls", str(tls), "--coordinator", "127.0.0.1:1"])
    assert "nothing.yaml" in str(sent.exception)


async def test_a_failed_handshake_is_one_line(tmp_path: Path) -> None:
    """Tests that gRPC's own log lines do not come before the error, unless they are asked for."""
    ours, other = Certificates(tmp_path / "ours"), Certificates(tmp_path / "other")
    server, address = await serve(ours.of(Role.COORDINATOR))
    command = [sys.executable, "-m", "services.coordinator", "status", "--coordinator", address]
    command += ["--tls", str(other.of(Role.OPERATOR))]

    async def said(**environment: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE, env=inherited | environment
        )
        return (await asyncio.wait_for(process.communicate(), PATIENCE_S))[1].decode()

    assert (await said()).startswith("lockstep: error: BAD_CERTIFICATE")
    assert "Handshake failed" in await said(GRPC_VERBOSITY="INFO")
    await server.grpc.stop(None)
