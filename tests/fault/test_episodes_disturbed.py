"""Kills the reward service and the coordinator in the middle of episodes."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.lockstep_command import LockstepRun, make_workspace, numbers, weights
from tests.support import free_port, running, service_command, still_there

NUM_STEPS = 3
# In their second turn, all episodes wait until the file `hold` is gone.
_GAME = """
import asyncio, pathlib

class Counts:
    roles = ()

    def reset(self, seed, row):
        self.turn = 0
        return [{"role": "", "content": str(seed % 10)}]

    async def step(self, text):
        self.turn += 1
        if self.turn == 2:
            pathlib.Path("stepped").touch()
            while pathlib.Path("hold").exists():
                await asyncio.sleep(0.01)
        digits = sum(c.isdigit() for c in text)
        return [{"role": "", "content": f"={digits}="}], float(digits), self.turn == 3
"""
_SECTIONS = {
    "num_steps": NUM_STEPS,
    "data": {"train": "data/train.parquet", "prompts_per_step": 8, "max_prompt_tokens": 16},
    "environment": {"kind": "python", "path": "game:Counts", "max_turns": 4, "on_failure": "fail"},
    "reward": {"on_failure": "fail"},
    "rollout": {
        "completions_per_prompt": 4,
        "max_model_len": 96,
        "max_samples": 8,
        "sampling": {"max_tokens": 8},
        # What is in the cache when a turn begins depends on timing, and with it the last bits of log-probabilities.
        "engine": {"enable_prefix_caching": False},
    },
    "trainer": {"num_ranks": 2, "max_tokens_per_microbatch": 1024, "optim": {"lr": 1e-3}},
    "evaluation": {},
    "checkpoint": {"save_freq": 1},
}


def make(directory: Path) -> Path:
    (directory / "game.py").write_text(_GAME)
    return make_workspace(directory, model=str(directory / "model"), **_SECTIONS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, lent: Sequence[str]) -> Path:
    workspace = make(tmp_path_factory.mktemp("undisturbed"))
    with LockstepRun(workspace, *lent[:2]) as run:
        assert run.wait() == 0, run.output + run.log
    return workspace


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory, lent: Sequence[str]) -> Iterator[LockstepRun]:
    """Kills the reward service within the episodes of the first step, then the coordinator within those of a later."""
    workspace = make(tmp_path_factory.mktemp("disturbed"))
    address = f"127.0.0.1:{free_port()}"
    command, log = service_command("reward", address), workspace / "reward.log"
    options = [*lent[:2], f"--reward={address}"]
    stepped = workspace / "stepped"
    with ExitStack() as stack, chdir(workspace):
        first = stack.enter_context(running(command, log))
        with LockstepRun(workspace, *options) as run:
            run.hold()
            run.until(stepped.exists, "a second turn")
            os.kill(first.pid, signal.SIGKILL)
            assert not still_there([first.pid])
            stepped.unlink()
            stack.enter_context(running(command, log))
            run.until(stepped.exists, "a second turn on the new service")
            run.release()
            run.until(lambda: run.has("published", 1), "version 1 to be served")
            run.hold()
            stepped.unlink()
            run.until(stepped.exists, "a second turn of a later step")
            run.process.kill()
        run.release()
        with LockstepRun(workspace, *options, "resume=auto") as run:
            assert run.wait() == 0, run.output + run.log
            yield run


def test_episodes_of_a_reward_service_that_was_lost_are_played_again(disturbed: LockstepRun):
    first, *others = numbers(disturbed.workspace)
    assert first["environment/failed_lost"] > 0
    assert all("environment/failed_lost" not in line for line in others)


def test_the_episodes_and_the_model_are_those_of_an_undisturbed_run(disturbed: LockstepRun, undisturbed: Path):
    ran = [
        sorted((workspace / "runs" / "run" / "batches").glob("*.parquet"))
        for workspace in (disturbed.workspace, undisturbed)
    ]
    assert len(ran[0]) == len(ran[1]) == NUM_STEPS
    for one, other in zip(*ran, strict=True):
        assert pq.read_table(one).equals(pq.read_table(other)), one.name
    assert weights(disturbed.workspace) == weights(undisturbed) != {}


def test_no_sample_of_a_lost_episode_is_trained_on(disturbed: LockstepRun):
    rows = [row for path in disturbed.directory.glob("batches/*.parquet") for row in pq.read_table(path).to_pylist()]
    assert {len(row["turn_ends"]) for row in rows} == {3}
    for row in rows:
        assert row["reward"] == sum(row["turn_rewards"]) and row["turn_ends"][-1] == len(row["tokens"])
