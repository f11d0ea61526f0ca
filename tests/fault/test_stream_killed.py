"""Kills a coordinator in the middle of a stream of blocks or of a step with a lag; its services go on."""

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.lockstep_command import LockstepRun, invoke, make_workspace, numbers, running_services, weights
from tests.fault.test_services_survive import trainer_version
from tests.support import PATIENCE_S, free_port

_SAMPLES, _BLOCKS = 32, 8  # of a step, at most: a block ends with 80 tokens, which most groups have
# Scores the share of digits. It stops once it has scored as many samples as the file `hold` says, while that exists.
_SCORER = """
import pathlib, time

def score(*, completion, **_):
    hold, scored = pathlib.Path("hold"), pathlib.Path("scored")
    while hold.exists() and scored.exists() and scored.stat().st_size >= int(hold.read_text() or 0):
        time.sleep(0.01)
    with scored.open("a") as file:
        file.write(".")
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
"""


def workspace(directory: Path, **trainer: Any) -> Path:
    directory.mkdir()
    made = make_workspace(
        directory,
        trainer={"num_ranks": 2, "max_tokens_per_microbatch": 80, "optim": {"lr": 1e-3}, **trainer},
        evaluation={"eval_before_train": False},
        model=str(directory / "model"),
    )
    (made / "gate.py").write_text(_SCORER)
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    "trainer", [{}, {"loss": {"old_logprobs": "engine"}, "lag": {"versions": 1}}], ids=["streamed", "lagged"]
)
def test_a_killed_coordinator_leaves_nothing_behind(tmp_path: Path, trainer: dict[str, Any]) -> None:
    undisturbed, disturbed = (workspace(tmp_path / name, **trainer) for name in ("undisturbed", "killed"))
    done = invoke("run", "run.yaml", cwd=undisturbed)
    assert done.returncode == 0, done.stdout + done.stderr
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("trainer", "reward", "rollout")}
    options = [f"--{name}={address}" for name, address in addresses.items()]
    with running_services(addresses, disturbed):
        with LockstepRun(disturbed, *options) as run:
            run.until(lambda: run.has("published", 1), "version 1 to be served")
            num_scored = (disturbed / "scored").stat().st_size
            # All of a step's samples but the last group.
            (disturbed / "hold").write_text(str((num_scored // _SAMPLES + 2) * _SAMPLES - 4))
            at = addresses["trainer"]
            if trainer:
                run.until(lambda: trainer_version(at) > _newest(run, "collected"), "the trainer to be ahead")
            else:
                run.until(lambda: _blocks_of(disturbed) > _BLOCKS * trainer_version(at), "a block")
            run.process.kill()
        (disturbed / "hold").unlink()
        with LockstepRun(disturbed, *options, "resume=auto") as run:
            assert run.wait() == 0, run.output
    assert numbers(disturbed) == numbers(undisturbed)
    assert weights(disturbed) == weights(undisturbed) != {}


def _newest(run: LockstepRun, kind: str) -> int:
    return max(row["version"] for row in run.ledger(kind))


def _blocks_of(directory: Path) -> int:
    """Returns how many blocks the trainer has computed, as it tells Prometheus."""
    (page,) = re.findall(r"metrics on (http://\S+)", (directory / "trainer.log").read_text())
    text = urllib.request.urlopen(page, timeout=PATIENCE_S).read().decode()
    found = re.search(r'^lockstep_trainer_phase_seconds_count\{phase="add_block".*\} (\S+)$', text, re.MULTILINE)
    return int(float(found[1])) if found else 0
