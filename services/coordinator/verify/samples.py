"""Checks the samples of a recorded batch: stamps, seeds, groups, the order of the data and the numbers made of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from services.common.batches import begins_of_samples, content_sha256, is_of_samples
from services.common.errors import DataLoss
from services.common.json_values import JsonMapping, JsonObject
from services.common.rpc.history import scores_hashes
from services.coordinator.data.order import EpochOrder, seed_of, shuffled
from services.coordinator.data.prompts import REFILLS
from services.coordinator.runs.record import without_answers

_STAMPED = ["prompt_id", "sample", "segment", "policy_version", "policy_digest"]
_CALLS = ["prompt_id", "group", "sample", "calls"]
_NUMBERS = ["prompt_id", "group", "sample", "segment", "seed", "policy_version", "policy_digest", "reward"]


@dataclass(frozen=True)
class Facts:
    """What other parts of the record must say too about a file of samples."""

    metrics: Mapping[str, float]
    sha256: str
    """SHA-256 of its values, as the trainer has it of the samples that it applied; empty for an evaluation."""
    scores: Mapping[str, Sequence[str]]
    """Hashes of the scores of each prompt's samples, by prompt id: see common.rpc.history.ids.scores_hashes."""


class SampleChecks:
    """Checks the samples of batch after batch, and remembers which prompt is at which place in the data."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.facts: dict[int, Facts] = {}
        """Facts of each batch that is still on disk, by the version that it updates."""
        self._prompts: dict[int, str] = {}  # place in the data -> prompt id
        self._order: EpochOrder | None = None

    def check(self, path: Path, step: int, body: JsonMapping, config: JsonMapping) -> Iterator[str]:
        """Yields a sentence for everything that is wrong in the batch of `step`.

        `body` has the fields of its rows `selected` and `collected`.

        Raises:
            DataLoss: The file cannot be read.
        """
        samples = _read_samples(path)
        rows = _rows(samples, _NUMBERS)
        yield from self._check_stamps(path, rows, (body.get("drawn", step), body["digest"]))
        for number, row in enumerate(rows):
            expected = seed_of(config["seed"], step, row["prompt_id"], row["sample"])
            if row["seed"] != expected:
                who = _describe_row(row, number, path)
                yield f"{who} has seed {row['seed']}, but the order of the run gives {expected}"
        yield from _check_groups(path, rows, body, config)
        yield from self._check_order(rows, step, body, config, path)
        self.facts[step] = Facts(_metrics_of(samples), content_sha256(samples).hex(), _scores_of(samples))

    def check_evaluation(self, path: Path, stamp: tuple[int, str], metrics: Mapping[str, float]) -> Iterator[str]:
        """Yields a sentence for every sample with another stamp than (version, digest), and for wrong metrics.

        Raises:
            DataLoss: The file cannot be read.
        """
        samples = _read_samples(path)
        yield from self._check_stamps(path, _rows(samples, _STAMPED), stamp)
        name = f"eval/{path.name.rpartition('-step-')[0]}/reward"
        yield from differing(path, {name: _metrics_of(samples)["reward/mean"]}, metrics)

    def _check_stamps(self, path: Path, rows: Sequence[JsonMapping], stamp: tuple[int, str]) -> Iterator[str]:
        self.num_samples += sum(not row.get("segment") for row in rows)
        for number, row in enumerate(rows):
            version, digest = row["policy_version"], row["policy_digest"]
            if (version, digest) != stamp:
                who = _describe_row(row, number, path)
                yield f"{who} carries version {version} with digest {digest}, not {stamp[0]} with {stamp[1]}"

    def _check_order(
        self, rows: Sequence[JsonMapping], step: int, body: JsonMapping, config: JsonMapping, path: Path
    ) -> Iterator[str]:
        """Compares the prompts with the order in which the step must try them. A curriculum reorders them."""
        if "num_prompts" not in body or config["selection"]["curriculum"]["enabled"]:
            return
        num_prompts, last = body["num_prompts"], max((row["group"] for row in rows), default=0)
        places = self._first_places(num_prompts, last + 1, step, config)
        for number, row in enumerate(rows):
            if not 0 <= row["group"] < num_prompts:
                yield f"{_describe_row(row, number, path)} is in group {row['group']} of {num_prompts} prompts"
                continue
            place, prompt = int(places[row["group"]]), row["prompt_id"]
            before = self._prompts.setdefault(place, prompt)
            if before != prompt:
                yield f"{path.name} has prompt {prompt} where the order of the data has {before}"

    def _first_places(self, num_prompts: int, num_tried: int, step: int, config: JsonMapping) -> list[int]:
        """Returns the places in the data of the first prompts that `step` tries, of at least `num_tried` if there are
        as many: see data/prompts.py: plain_order."""
        data, seed = config["data"], config["seed"]
        if self._order is None:
            self._order = EpochOrder(num_prompts, data["prompts_per_step"], seed=seed, shuffle=data["shuffle"])
        batch = self._order.indices(step).tolist()
        if num_tried <= len(batch):
            return batch
        # The selection fills up dropped groups from the rest of the data, in an order of the step's own.
        taken = set(batch)
        rest = [place for place in shuffled(num_prompts, seed, step, REFILLS).tolist() if place not in taken]
        return [*batch, *rest]


def differing(path: Path, metrics: Mapping[str, float], recorded: Mapping[str, float]) -> Iterator[str]:
    """Yields a sentence for every metric of the samples in `path` that is recorded otherwise, not only rounded."""
    for name, value in metrics.items():
        said = recorded.get(name, value)
        if not (math.isclose(said, value, rel_tol=1e-9, abs_tol=1e-12) or (said != said and value != value)):
            yield f"{name} of the samples in {path.name} is {value:g}, but the ledger has {said:g}"


def check_calls(path: Path, calls_path: Path) -> Iterator[str]:
    """Yields a sentence for every call of the rows in `path` that is recorded otherwise, and for answers in no row.

    Raises:
        DataLoss: A file cannot be read.
    """
    episodes = {(one["group"], one["sample"]): one for one in _read(calls_path, _CALLS).to_pylist()}
    recorded = {key: {call["number"]: call for call in one["calls"]} for key, one in episodes.items()}
    in_rows: dict[tuple[int, int], set[int]] = {key: set() for key in episodes}
    for number, row in enumerate(_read(path, _CALLS).to_pylist()):
        key = row["group"], row["sample"]
        for call in row["calls"] or ():
            known = recorded.get(key, {}).get(call["number"], {})
            if any(known.get(name, -1) != call[name] for name in ("parent", "sha256")):
                yield f"call {call['number']} of {_describe_row(row, number, path)} is not that of {calls_path.name}"
            in_rows.setdefault(key, set()).add(call["number"])
    for key, one in episodes.items():
        lost = {call["number"] for call in one["calls"] if call["answer"] is not None} - in_rows[key]
        if lost:
            who = f"call {min(lost)} of sample {one['sample']} of prompt {one['prompt_id']}"
            yield f"{who} in {calls_path.name} was answered and is in no row of {path.name}"


def _check_groups(path: Path, rows: Sequence[JsonMapping], body: JsonMapping, config: JsonMapping) -> Iterator[str]:
    """Compares the samples of each group with those that every group has, and their number with the selection."""
    samples_of: dict[int, list[int]] = {}
    segments = set[tuple[int, int, int]]()
    for number, row in enumerate(rows):
        segment = row["group"], row["sample"], row.get("segment") or 0
        if segment in segments:
            yield f"{_describe_row(row, number, path)} is in the batch twice"
        elif not segment[-1]:
            samples_of.setdefault(row["group"], []).append(row["sample"])
        segments.add(segment)
    if "num_groups" not in body:
        return
    if len(samples_of) != body["num_groups"]:
        yield f"{path.name} has {len(samples_of)} groups, but {body['num_groups']} were selected"
    for group, samples in samples_of.items():
        if sorted(samples) != list(range(config["rollout"]["completions_per_prompt"])):
            yield f"{path.name} has samples {sorted(samples)} of group {group}"


def _metrics_of(samples: pa.Table) -> dict[str, float]:
    """Returns metrics of a step (rl.metrics.batch_metrics) that cost little to compute again."""
    num_tokens, samples = pc.sum(pc.list_value_length(samples["tokens"])).as_py(), _first_rows(samples)
    return {
        "reward/mean": float(samples["reward"].to_numpy().mean()),
        "batch/samples": float(samples.num_rows),
        "batch/tokens": float(num_tokens),
        "completion/truncated": float(pc.mean(pc.equal(samples["finish_reason"], "length")).as_py()),
    }


def _scores_of(samples: pa.Table) -> dict[str, Sequence[str]]:
    """Returns the hashes of each prompt's scores; that of the rewards only if no environment has added its own."""
    scores: dict[str, list[tuple[float, dict[str, float]]]] = {}
    of_environment = set[str]()
    for row in _first_rows(samples).select(["prompt_id", "reward", "components", "environment"]).to_pylist():
        components = {name: value for name, value in row["components"] if name != "environment"}
        scores.setdefault(row["prompt_id"], []).append((row["reward"], components))
        if row["environment"] is not None:
            of_environment.add(row["prompt_id"])
    return {name: scores_hashes(some)[: 1 if name in of_environment else 2] for name, some in scores.items()}


def _first_rows(samples: pa.Table) -> pa.Table:
    """Returns one row of each sample; a sample of an agent has several."""
    return samples.take(pa.array(begins_of_samples(samples)))


def _rows(samples: pa.Table, names: Sequence[str]) -> list[JsonObject]:
    """Returns some columns of samples. Batches of earlier releases lack the newest."""
    return samples.select([name for name in names if name in samples.column_names]).to_pylist()


def _read_samples(path: Path) -> pa.Table:
    samples = without_answers(_read(path))
    if not is_of_samples(samples.schema):
        raise DataLoss(f"{path} is damaged: it has not the columns of samples")
    return samples


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise DataLoss(f"{path} is damaged: {error}") from error


def _describe_row(row: JsonMapping, number: int, path: Path) -> str:
    return f"sample {row['sample']} of prompt {row['prompt_id']} (row {number} of {path.name})"
