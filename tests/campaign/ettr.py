"""`python -m tests.campaign.ettr`: how much of a run's time is training if a process is killed in every tenth step.

The same run is timed undisturbed and with kills, on the same warm services: the effective training time ratio is the
quotient. A killed coordinator is started again at once, as an orchestrator does. A restart takes as long however long a
step is, so the ratio depends on the step: `--completions`, `--tokens`, `--hidden` and `--layers` make it longer.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.report import RESULTS, version_of
from tests.campaign.cluster import Cluster
from tests.campaign.episode import Episode, Plan, Result, exported
from tests.campaign.faults.base import PROCESSES
from tests.campaign.workspace import make_files, write_config

_EVERY, _FIRST = 10, 5
_MAX_SESSIONS = 200


@dataclass(frozen=True)
class Times:
    """How long a run took."""

    total_s: float
    step_s: list[float]
    """From one finished step to the next; the first from the start."""


class Kills:
    """Kills a process at some event of every tenth step; the seed chooses which and when."""

    def __init__(self, cluster: Cluster, seed: int, events_per_step: int):
        self._cluster, self._number, self._events_per_step = cluster, random.Random(seed), events_per_step
        self._num_finished, self._countdown = 0, -1
        self.coordinator = 0
        self.killed: list[str] = []
        self.killed_in: list[int] = []
        """The number of finished steps at each kill; a step that was lost with its record counts twice."""
        self.finished_s: list[float] = []
        self.num_events = 0

    async def at_gate(self, event: str) -> str:
        self.num_events += 1
        if event == "coordinator.finished.end":
            self._num_finished += 1
            self.finished_s.append(time.monotonic())
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
            self.killed_in.append(self._num_finished)
            os.kill(pid, signal.SIGKILL)


async def timed(cluster: Cluster, directory: Path, files: Path, changes: Mapping[str, Any], kills: Kills) -> Times:
    """Returns the seconds that a run takes, over all its sessions, and those between its finished steps."""
    directory.mkdir()
    write_config(directory, files, "whole", is_real=cluster.is_real)
    config = yaml.safe_load((directory / "run.yaml").read_text())
    (directory / "run.yaml").write_text(yaml.safe_dump(_changed(config, changes)))
    episode = Episode(cluster, directory, files, Result(0, Plan("whole", "kill", "coordinator", "", 0)))
    await cluster.until_ready()
    begin = time.monotonic()
    for _ in range(_MAX_SESSIONS):
        coordinator = await episode._start("run", cluster.gate)
        kills.coordinator, cluster.on_event = coordinator.pid, kills.at_gate
        if await episode._end_of(coordinator) == 0:
            ends = [begin, *kills.finished_s]
            return Times(time.monotonic() - begin, [round(end - before, 3) for before, end in pairwise(ends)])
        await cluster.until_ready()
    raise AssertionError(f"not done after {_MAX_SESSIONS} sessions: {episode._tail()}")


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {
        name: _changed(config[name], change) if isinstance(change, dict) else change for name, change in changes.items()
    }
    return {**config, **merged}


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the options change in the campaign's config."""
    changes: dict[str, Any] = {"num_steps": options.steps}
    if options.completions:
        changes["rollout"] = {"completions_per_prompt": options.completions, "max_samples": options.completions}
    if options.tokens:
        changes |= {"rollout": {**changes.get("rollout", {}), "sampling": {"max_tokens": options.tokens}}}
    return changes


def _make_larger(model: Path, hidden: int, layers: int) -> int:
    """Gives the quickstart's model another shape and random weights; returns the number of its parameters."""
    config = AutoConfig.from_pretrained(model)
    config.update({"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers})
    config.update({"num_attention_heads": hidden // config.head_dim, "layer_types": ["full_attention"] * layers})
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(model)
    return made.num_parameters()


def _without_out(arguments: list[str]) -> list[str]:
    at = arguments.index("--out") if "--out" in arguments else len(arguments)
    return arguments[:at] + arguments[at + 2 :]


async def _measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    is_real, changes = options.services == "real", _changes(options)
    make_files(directory, is_real=is_real)
    num_parameters = _make_larger(directory / "model", options.hidden, options.layers) if options.hidden else None
    load = [os.getloadavg()]
    async with Cluster(directory, is_real=is_real).running() as cluster:
        first = {**changes, "num_steps": 1}  # the first run compiles, and reads what later ones find in memory
        await timed(cluster, directory / "first", directory, first, Kills(cluster, options.seed, 0))
        none = Kills(cluster, options.seed, 0)
        alone = await timed(cluster, directory / "alone", directory, changes, none)
        load.append(os.getloadavg())
        kills = Kills(cluster, options.seed, none.num_events // options.steps)
        killed = await timed(cluster, directory / "killed", directory, changes, kills)
        load.append(os.getloadavg())
        same = exported(directory / "alone" / "runs" / "run") == exported(directory / "killed" / "runs" / "run")
    return {
        "benchmark": options.name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", "-m", "tests.campaign.ettr", *_without_out(sys.argv[1:])]),
        "cores": len(os.sched_getaffinity(0)),
        "load_before_between_after": load,
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in ("torch", "vllm")}},
        "services": options.services,
        "steps": options.steps,
        "changes": changes,
        "parameters": num_parameters,
        "killed": kills.killed,
        "killed_after_steps": kills.killed_in,
        "undisturbed_s": round(alone.total_s, 3),
        "with_kills_s": round(killed.total_s, 3),
        "lost_per_kill_s": round((killed.total_s - alone.total_s) / max(1, len(kills.killed)), 3),
        "ettr": round(alone.total_s / killed.total_s, 4),
        "weights_are_equal": same,
        "undisturbed_step_s": alone.step_s,
        "step_s_with_kills": killed.step_s,
    }


def main() -> int:
    """Returns 1 if the weights are not those of the undisturbed run."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.ettr", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--services", choices=("toy", "real"), default="toy")
    parser.add_argument("--completions", type=int, default=0, help="completions of a prompt; as in the campaign: 2")
    parser.add_argument("--tokens", type=int, default=0, help="most tokens of a completion; as in the campaign: 8")
    parser.add_argument(
        "--hidden", type=int, default=0, help="hidden size of a model with random weights; with --layers"
    )
    parser.add_argument("--layers", type=int, default=4)
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
