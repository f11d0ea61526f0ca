"""`python -m tests.campaign --episodes N --seed S [--faults kill,stop,...]`: runs episodes and saves every row."""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS
from tests.campaign.cluster import Cluster
from tests.campaign.episode import Baseline, Episode, Result, baseline_of, make_plan
from tests.campaign.faults.all import FAULTS
from tests.campaign.table import save, table
from tests.campaign.workspace import NUM_STEPS, VARIANTS, make_files
from tests.small_disk import take_own_mounts


@asynccontextmanager
async def warm(
    directory: Path, variants: Sequence[str], *, is_real: bool = False
) -> AsyncIterator[tuple[Cluster, Mapping[str, Baseline]]]:
    """Starts the services, and runs each variant undisturbed."""
    make_files(directory, is_real=is_real)
    async with Cluster(directory, is_real=is_real).running() as cluster:
        baselines = {name: await baseline_of(cluster, directory / f"as-{name}", directory, name) for name in variants}
        yield cluster, baselines


async def play(cluster: Cluster, baselines: Mapping[str, Baseline], directory: Path, result: Result) -> Result:
    """Plays one episode."""
    episode = Episode(cluster, directory / "episode", directory, result)
    await episode.run(baselines[result.plan.variant])
    return result


async def _campaign(options: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    faults = options.faults.split(",") if options.faults else [*FAULTS]
    events = set(options.events.split(",")) if options.events else None
    rows: list[dict[str, Any]] = []
    async with warm(directory, options.variants.split(","), is_real=options.services == "real") as (cluster, baselines):
        if events:
            baselines = {name: _only(baseline, events) for name, baseline in baselines.items()}
        for episode in range(options.first, options.first + options.episodes):
            result = Result(episode, make_plan(options.seed, episode, faults, baselines))
            await play(cluster, baselines, directory, result)
            rows.append(result.row())
            sys.stdout.write(f"{json.dumps(rows[-1])}\n")
            sys.stdout.flush()
            if result.violations and options.keep:
                (directory / "episode").rename(Path(options.keep) / f"{options.seed}-{episode}")
            _save(options, rows, baselines)
    return rows


def _only(baseline: Baseline, events: set[str]) -> Baseline:
    return replace(baseline, events={name: number for name, number in baseline.events.items() if name in events})


def _save(options: argparse.Namespace, rows: list[dict[str, Any]], baselines: Mapping[str, Baseline]) -> None:
    seconds = {name: baseline.seconds for name, baseline in baselines.items()}
    lost = [row["wall_s"] - seconds[row["variant"]] for row in rows]
    step_s = statistics.mean(seconds.values()) / NUM_STEPS
    # Effective training time: the share of the time that is left for training if every tenth step has a fault.
    ettr = step_s / (step_s + 0.1 * max(0.0, statistics.mean(lost)))
    content = {
        "benchmark": options.name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": f"python -m tests.campaign --seed {options.seed} --first {options.first} --episodes {len(rows)}"
        + (f" --faults {options.faults}" if options.faults else "")
        + (f" --events {options.events}" if options.events else "")
        + (" --services real" if options.services == "real" else "")
        + (f" --variants {options.variants}" if options.variants != ",".join(VARIANTS) else ""),
        "services": options.services,
        "episodes": len(rows),
        "injected": sum(row["injected"] for row in rows),
        "violations": sum(bool(row["violations"]) for row in rows),
        "undisturbed_s": seconds,
        "mean_lost_s": statistics.mean(lost),
        "ettr_at_a_fault_in_every_tenth_step": ettr,
    }
    save(Path(options.out) / f"{options.name}.json", content, rows)


def main() -> int:
    """Returns 1 if there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", allow_abbrev=False)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first episode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default="", help=f"comma-separated; all by default: {', '.join(FAULTS)}")
    parser.add_argument("--events", default="", help="events at which faults happen, comma-separated; all by default")
    parser.add_argument("--services", choices=("toy", "real"), default="toy")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="kinds of run, comma-separated; all by default")
    parser.add_argument("--name", default="campaign-toy", help="name of the result")
    parser.add_argument("--out", default=str(RESULTS), help="where the result is saved")
    parser.add_argument("--keep", default="", help="directory for the files of episodes with a violation")
    options = parser.parse_args()
    take_own_mounts()
    with tempfile.TemporaryDirectory(prefix="campaign-") as directory:
        rows = asyncio.run(_campaign(options, Path(directory)))
    sys.stdout.write(f"{table(rows)}\n")
    return int(any(row["violations"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
