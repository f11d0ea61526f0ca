"""Tests that a user's mistake gives one line on stderr that names it, exit code 2, and leaves nothing running."""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from services.coordinator.cli.main import main
from tests.e2e.lockstep_command import LockstepRun, execute, make_workspace, running_services
from tests.support import free_port, still_there


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_workspace(tmp_path_factory.mktemp("bad-input"))
    rows = pq.read_table(directory / "data" / "train.parquet")
    pq.write_table(rows.slice(0, 0), directory / "empty.parquet")
    pq.write_table(rows.rename_columns(["question", *rows.column_names[1:]]), directory / "other.parquet")
    pq.write_table(pa.table({"prompt": ["1+1=", None] * 8, "answer": ["2"] * 16}), directory / "null.parquet")
    (directory / "text.parquet").write_text("not Parquet")
    (directory / "list.yaml").write_text("- 1\n")
    (directory / "broken.yaml").write_text("a: [1\n")
    shutil.copytree(directory / "model", directory / "with-code")
    config = json.loads((directory / "model" / "config.json").read_text())
    (directory / "with-code" / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "m.M"}}))
    (directory / "empty-model").mkdir()
    weights = load_file(directory / "model" / "model.safetensors")
    for name, tensors in (("no-weights", {}), ("more-weights", weights)):
        shutil.copytree(directory / "model", directory / name)
        save_file({**tensors, "other": np.zeros(1, np.float32)}, directory / name / "model.safetensors")
    return directory


def the_error(completed: subprocess.CompletedProcess[str]) -> str:
    assert completed.returncode == 2, completed
    assert "Traceback" not in completed.stdout + completed.stderr
    (line,) = completed.stderr.splitlines()
    assert line.startswith("lockstep: error: ")
    return line


NOWHERE = "127.0.0.1:9"
MISTAKES = {
    "unknown key": (["trainer.optim.learning_rate=1"], ["trainer.optim.learning_rate", "unknown key", "command line"]),
    "misspelled key": (["trainer.optim.lrr=1"], ["trainer.optim.lrr", "did you mean trainer.optim.lr?"]),
    "wrong type": (["num_steps=many"], ["num_steps", "integer", "'many'"]),
    "batch and ranks": (
        ["trainer.num_minibatches=8", "trainer.num_ranks=5"],
        ["trainer.num_ranks 5", "every rank needs at least one"],
    ),
    "batch and mini-batches": (["trainer.num_minibatches=3"], ["prompts_per_step 8", "num_minibatches 3", "nearest"]),
    "lengths": (["rollout.max_model_len=32"], ["rollout.max_model_len", "at least 48"]),
    "one sample": (["rollout.completions_per_prompt=1"], ["rollout.completions_per_prompt", "at least 2"]),
    "truncated sampling": (["rollout.sampling.top_p=0.9"], ["rollout.sampling", "set top_k"]),
    "no such config": (["no-such.yaml"], ["no-such.yaml", "does not exist"]),
    "config is a list": (["list.yaml"], ["list.yaml", "list"]),
    "config is not YAML": (["broken.yaml"], ["broken.yaml", "not YAML"]),
    "no such data": (["data.train=nowhere.parquet"], ["data.train", "nowhere.parquet"]),
    "data is not Parquet": (["data.train=text.parquet"], ["data.train", "text.parquet"]),
    "empty data": (["data.train=empty.parquet"], ["data.train", "empty.parquet"]),
    "missing column": (["data.train=other.parquet"], ["other.parquet", "prompt"]),
    "missing prompts": (["data.train=null.parquet"], ["null.parquet", "prompt"]),
    "too few prompts": (["data.prompts_per_step=80"], ["data.prompts_per_step", "80", "64"]),
    "no such model": (["model=no-such-model"], ["model", "no-such-model", "does not exist"]),
    "empty model": (["model=empty-model"], ["empty-model", "model.safetensors"]),
    "no weights": (["model=no-weights"], ["no-weights", "model.embed_tokens.weight"]),
    "model with code": (["model=with-code"], ["with-code", "auto_map"]),
    "resume from nothing": (["resume=no/checkpoint"], ["resume", "no/checkpoint", "manifest.json"]),
    "must resume": (["resume=must"], ["resume", "holds no run"]),
    "bad address": (["--trainer", "localhost"], ["--trainer", "'localhost'", "HOST:PORT"]),
    "bad port": (["--rollout", "localhost:99999"], ["--rollout", "HOST:PORT"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_before_a_service_starts(
    workspace: Path, mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Runs the command in this process, because a new one would take seconds to import it for each mistake."""
    arguments, words = MISTAKES[mistake]
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "argv", ["lockstep", "run", "run.yaml", f"runs_dir=runs/{mistake}", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    line = the_error(subprocess.CompletedProcess(sys.argv, ended.value.code, output.out, output.err))
    assert all(word in line for word in words), line
    assert not (workspace / "runs" / mistake / "run" / "logs" / "trainer.log").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trainer.optim.lrr=1"], ["trainer.optim.lrr", "did you mean trainer.optim.lr?"]),
        (
            ["--trainer", NOWHERE, "--reward", NOWHERE, "--rollout", NOWHERE, "timeouts.open_s=6"],
            [NOWHERE, "Connection refused"],
        ),
    ],
    ids=["misspelled key", "nobody there"],
)
def test_the_command_says_it(workspace: Path, arguments: list[str], words: list[str]):
    line = the_error(execute("run", "run.yaml", "name=said", *arguments, cwd=workspace))
    assert all(word in line for word in words), line


def refusal(run: LockstepRun) -> str:
    """Returns the line in which a run that has ended says why, and removes its directory."""
    assert run.process.returncode == 2, run.output
    assert "Traceback" not in run.output
    (line,) = [line for line in run.output.splitlines() if line.startswith("lockstep: error: ")]
    shutil.rmtree(run.workspace / "runs")
    return line


def test_what_a_started_service_notices(workspace: Path, lent: Sequence[str]):
    with LockstepRun(workspace, lent[1], "trainer.num_ranks=1", "model=more-weights") as run:
        run.until(lambda: run.services("trainer"), "the services to start")
        below = set(run.below())
        while run.process.poll() is None:
            below |= set(run.below())
            still_there([run.process.pid], after_s=0.2)
        assert not still_there(below)
    line = refusal(run)
    assert "more-weights" in line and "other in its checkpoint" in line


def test_what_a_given_service_notices(workspace: Path, lent: Sequence[str]):
    address = f"127.0.0.1:{free_port()}"
    given = [*lent[:2], f"--reward={address}", f"model={workspace / 'model'}"]
    mistakes = {
        'reward.scorers=[{kind: python, path: "no_such_module:score"}]': ("no_such_module", "scorers"),
        "rollout.engine={no_such_option: 1}": ("rollout", "no_such_option"),
    }
    with running_services({"reward": address}, workspace) as (reward,):
        for mistake, words in mistakes.items():
            with LockstepRun(workspace, *given, mistake) as run:
                run.wait()
            line = refusal(run)
            assert all(word in line for word in words), line
        assert reward.poll() is None


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("{taken}", ["--listen {taken}", "port is in use"]),
        ("nonsense", ["'nonsense'", "HOST:PORT"]),
        ("0.0.0.0:0", ["0.0.0.0", "--insecure"]),
    ],
)
def test_a_service_that_cannot_listen(workspace: Path, address: str, words: list[str]):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        command = [sys.executable, "-m", "services.reward", "--listen", address.format(taken=taken)]
        ended = subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stdout + ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert re.match("lockstep-reward: ", last)
    for word in words:
        assert word.format(taken=taken) in last
