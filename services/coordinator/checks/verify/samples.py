"""Checks the samples of a recorded batch: stamps, seeds and the order of the data."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from services.coordinator.data.curriculum import REFILLS
from services.coordinator.data.order import EpochOrder, shuffled
from services.coordinator.data.seeds import seed_of

_COLUMNS = ["prompt_id", "group", "sample", "seed", "policy_version", "policy_digest"]


class SampleChecks:
    """Checks the samples of batch after batch, and remembers which prompt is at which place in the data."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._prompts: dict[int, str] = {}  # place in the data -> prompt id
        self._order: EpochOrder | None = None

    def check(self, path: Path, step: int, body: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
        """Yields a sentence for everything that is wrong in the batch of `step`, whose row is `body`."""
        yield from self.check_stamps(path, (body.get("drawn", step), body["digest"]))
        rows = pq.read_table(path, columns=_COLUMNS).to_pylist()
        seen: set[tuple[str, int]] = set()
        for number, row in enumerate(rows):
            who = _who(row, number, path)
            if (row["prompt_id"], row["sample"]) in seen:
                yield f"{who} is in the batch twice"
            seen.add((row["prompt_id"], row["sample"]))
            expected = seed_of(config["seed"], step, row["prompt_id"], row["sample"])
            if row["seed"] != expected:
                yield f"{who} has seed {row['seed']}, but the order of the run gives {expected}"
        yield from self._check_order(rows, step, body, config, path.name)

    def check_stamps(self, path: Path, stamp: tuple[int, str]) -> Iterator[str]:
        """Yields a sentence for every sample of a file that carries another stamp than (version, digest)."""
        try:
            samples = pq.read_table(path, columns=_COLUMNS)
        except (pa.ArrowException, OSError) as error:
            yield f"{path.name} cannot be read: {error}"
            return
        self.num_samples += samples.num_rows
        for number, row in enumerate(samples.to_pylist()):
            found = row["policy_version"], row["policy_digest"]
            if found != stamp:
                who = _who(row, number, path)
                yield f"{who} carries version {found[0]} with digest {found[1]}, not {stamp[0]} with {stamp[1]}"

    def _check_order(
        self, rows: list[dict[str, Any]], step: int, body: Mapping[str, Any], config: Mapping[str, Any], name: str
    ) -> Iterator[str]:
        """Compares the prompts with the order in which the step must try them. A curriculum reorders them."""
        if "num_prompts" not in body or config["selection"]["curriculum"]["enabled"]:
            return
        places = self._places(body["num_prompts"], step, config)
        for row in rows:
            place, prompt = int(places[row["group"]]), row["prompt_id"]
            before = self._prompts.setdefault(place, prompt)
            if before != prompt:
                yield f"{name} has prompt {prompt} where the order of the data has {before}"

    def _places(self, num_prompts: int, step: int, config: Mapping[str, Any]) -> list[int]:
        """Returns the places in the data of the prompts that `step` tries: see data/curriculum.py: plain_order."""
        data, seed = config["data"], config["seed"]
        if self._order is None:
            self._order = EpochOrder(num_prompts, data["prompts_per_step"], seed=seed, shuffle=data["shuffle"])
        batch = self._order.indices(step).tolist()
        taken = set(batch)
        rest = [place for place in shuffled(num_prompts, seed, step, REFILLS).tolist() if place not in taken]
        return [*batch, *rest]


def _who(row: Mapping[str, Any], number: int, path: Path) -> str:
    return f"sample {row['sample']} of prompt {row['prompt_id']} (row {number} of {path.name})"
