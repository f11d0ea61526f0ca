"""`python -m tests.campaign.ettr`: how much of a run's time is training if a process is killed in every tenth step.

The same run is timed undisturbed and with kills, on the same warm services: the effective training time ratio is the
quotient. A killed coordinator is started again at once, as an orchestrator does.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report import RESULTS
from tests.campaign.cluster import Cluster
from tests.campaign.episode import Episode, Plan, Result, exported
from tests.campaign.faults.base import PROCESSES
from tests.campaign.workspace import make_files, write_config

_EVERY, _FIRST = 10, 5
_MAX_SESSIONS = 200


class Kills:
    """Kills a process at some event of every tenth step; the seed chooses which and when."""

    def __init__(self, cluster: Cluster, seed: int, events_per_step: int):
        self._cluster, self._number, self._events_per_step = cluster, random.Random(seed), events_per_step
        self._num_finished, self._countdown = 0, -1
        self.coordinator = 0
        self.killed: list[str] = []
        self.num_events = 0

    async def at_gate(self, event: str) -> str:
        self.num_events += 1
        if event == "coordinator.finished.end":
            self._num_finished += 1
            if self._events_per_step and self._num_finished % _EVERY == _FIRST:
                self._countdown = self._number.randrange(self._events_per_step)
        if self._countdown == 0:
            self._kill()
        self._countdown -= 1
        return "go"

    def _kill(self) -> None:
        victim = self._number.choice(PROCESSES)
        pid = self.coordinator if victim == "coordinator" else self._cluster.pid_of(victim)
        if pid:
            self.killed.append(victim)
            os.kill(pid, signal.SIGKILL)


async def timed(cluster: Cluster, directory: Path, files: Path, num_steps: int, kills: Kills) -> float:
    """Returns the seconds that a run takes, over all its sessions."""
    directory.mkdir()
    write_config(directory, files, "whole", is_real=cluster.is_real)
    config = yaml.safe_load((directory / "run.yaml").read_text())
    (directory / "run.yaml").write_text(yaml.safe_dump(config | {"num_steps": num_steps}))
    episode = Episode(cluster, directory, files, Result(0, Plan("whole", "kill", "coordinator", "", 0)))
    await cluster.until_ready()
    begin = time.monotonic()
    for _ in range(_MAX_SESSIONS):
        coordinator = await episode._start("run", cluster.gate)
        kills.coordinator, cluster.on_event = coordinator.pid, kills.at_gate
        if await episode._end_of(coordinator) == 0:
            return time.monotonic() - begin
        await cluster.until_ready()
    raise AssertionError(f"not done after {_MAX_SESSIONS} sessions: {episode._tail()}")


async def _measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    is_real = options.services == "real"
    make_files(directory, is_real=is_real)
    async with Cluster(directory, is_real=is_real).running() as cluster:
        none = Kills(cluster, options.seed, 0)
        alone_s = await timed(cluster, directory / "alone", directory, options.steps, none)
        kills = Kills(cluster, options.seed, none.num_events // options.steps)
        killed_s = await timed(cluster, directory / "killed", directory, options.steps, kills)
        same = exported(directory / "alone" / "runs" / "run") == exported(directory / "killed" / "runs" / "run")
    return {
        "benchmark": options.name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": f"python -m tests.campaign.ettr --services {options.services} --steps {options.steps} "
        f"--seed {options.seed}",
        "services": options.services,
        "steps": options.steps,
        "killed": kills.killed,
        "undisturbed_s": round(alone_s, 3),
        "with_kills_s": round(killed_s, 3),
        "lost_per_kill_s": round((killed_s - alone_s) / max(1, len(kills.killed)), 3),
        "ettr": round(alone_s / killed_s, 4),
        "weights_are_equal": same,
    }


def main() -> int:
    """Returns 1 if the weights are not those of the undisturbed run."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.ettr", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--services", choices=("toy", "real"), default="toy")
    parser.add_argument("--name", default="campaign-ettr")
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ettr-") as directory:
        found = asyncio.run(_measure(options, Path(directory)))
    (Path(options.out) / f"{options.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(f"{json.dumps(found, indent=1)}\n")
    return int(not found["weights_are_equal"])


if __name__ == "__main__":
    sys.exit(main())
