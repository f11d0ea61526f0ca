"""Evaluates held-out prompts: mean reward of n samples (avg@n), pass@k, reward components and lengths.

A run does so while it trains. `lockstep eval` evaluates a checkpoint or a model, as a run without steps in a directory
of its own.
"""

import datetime
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp
from rich.console import Console
from rich.table import Table

from services.common.batches import begins_of_samples
from services.common.config.advantage import AdvantageConfig
from services.common.config.evaluation import EvalSetConfig
from services.common.config.load import is_override, load, load_any
from services.common.config.rollout import SamplingConfig
from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.common.errors import InvalidInput, NotFound
from services.common.files import write_whole
from services.common.rewards import reaches
from services.coordinator.data.groups import answers_of, rewards_by_column, to_table
from services.coordinator.data.prompts import Prompts, load_eval, load_from_card, load_if_local
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.opening import Services, open_services
from services.coordinator.fleet.probes import Tools, known_tools
from services.coordinator.fleet.running import recorded_run, running_services
from services.coordinator.observe.frontend import cancel_on_sigterm
from services.coordinator.rl.metrics import batch_metrics, component_means
from services.coordinator.rl.publishing import make_publisher
from services.coordinator.rl.sampling.collect import Collector, check_words
from services.coordinator.rl.sampling.episodes import make_collector
from services.coordinator.runs.checkpoints import versions_of
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.ledger import LEDGER
from services.coordinator.runs.resume import CHECKPOINTS, require_own_paths
from services.coordinator.runs.run import Run
from services.coordinator.text.tokenizer import Tokenizer


def load_held_out(config: Config, tokenizer: Tokenizer, tools: Tools | None) -> dict[str, Prompts]:
    """Returns the prompts of each set by its name, with a chat template that shows `tools`.

    Raises:
        InvalidInput: See Tokenizer.with_tools, RowFile.held_out and Prompts.require_used.
    """
    shown = tokenizer.with_tools(tools or ())
    held_out = load_eval(config.data, shown, needs_answer=config.reward.reads_answers)
    for name, rows in held_out.items():
        rows.require_used(config, f"data.eval.{name}")
    return held_out


async def evaluate(
    run: Run, collector: Collector, eval_data: Mapping[str, Prompts], stamp: PolicyStamp
) -> dict[str, float]:
    """Samples every set, writes the samples as Parquet and returns the metrics, named `eval/<set>/<metric>`.

    Every prompt counts, regardless of `reward.on_failure`: a sample that could not be scored has reward 0, and `failed`
    is the number of such samples, if there are any.
    """
    metrics: dict[str, float] = {}
    scored: dict[str, str] = {}
    digests: dict[str, str] = {}
    with run.phase(Phase.EVALUATING):
        for name, prompts in eval_data.items():
            settings = run.config.evaluation.settings(name)
            sampling = eval_sampling(settings, run.config.rollout.sampling)
            groups = await collector.collect(
                name, [*islice(prompts, settings.max_prompts)], settings.num_samples, sampling, stamp
            )
            samples = to_table(groups)
            is_failed = np.concatenate([group.is_failed for group in groups])
            of_set = set_metrics(samples, settings, is_failed)
            of_set |= rewards_by_column(groups, run.config.data.metrics_column)
            if is_failed.any():
                of_set["failed"] = float(is_failed.sum())
            metrics |= {f"eval/{name}/{metric}": value for metric, value in of_set.items()}
            run.record.keep_evaluation(name, samples, stamp, answers_of(groups))
            digests[name] = _digest(settings, sampling)
            scored = versions_of(samples) | {"settings": json.dumps(digests)}
    await run.record.ledger.free()
    run.finish_evaluation(stamp.version, metrics, scored)
    return metrics


def _digest(settings: EvalSetConfig, sampling: SamplingConfig) -> str:
    """Returns a digest of what decides about a set's numbers besides its data, the weights and the scorers."""
    numbers = sampling.model_dump_json() + settings.model_dump_json(
        include={"num_samples", "max_prompts", "pass_threshold"}
    )
    return hashlib.sha256(numbers.encode()).hexdigest()[:8]


def eval_sampling(settings: EvalSetConfig, training: SamplingConfig) -> SamplingConfig:
    """Returns how a set is sampled: as in training, apart from what the set says by itself."""
    own = {name: getattr(settings, name) for name in SamplingConfig.model_fields if hasattr(settings, name)}
    return training.model_copy(update=own | {"max_tokens": settings.max_tokens or training.max_tokens})


def set_metrics(samples: pa.Table, settings: EvalSetConfig, is_failed: np.ndarray) -> dict[str, float]:
    """Computes the metrics of one set from its samples (common.batches.SAMPLE_SCHEMA), and which were not scored.

    `reward` is the mean over all samples, `pass@k` the mean of pass_at_k over the prompts, `tokens_mean` the mean
    completion length in tokens, `truncated` the fraction of completions that reached max_tokens. Each reward component
    adds its mean over all samples under its own name. A sample that was not scored does not pass.
    """
    numbers = batch_metrics(samples)
    samples = samples.take(pa.array(begins_of_samples(samples)))  # each counts once, however many rows it has
    metrics = {"reward": numbers["reward/mean"]}
    _, prompt_of = np.unique(samples["group"].to_numpy(), return_inverse=True)
    num_samples = np.bincount(prompt_of)
    is_passed = ~is_failed & reaches(samples["reward"].to_numpy(), settings.pass_threshold)
    num_passed = np.bincount(prompt_of, is_passed)
    for k in settings.pass_k:
        chances = [pass_at_k(n, int(c), k) for n, c in zip(num_samples.tolist(), num_passed, strict=True)]
        metrics[f"pass@{k}"] = float(np.mean(chances))
    metrics |= {name: numbers[f"completion/{name}"] for name in ("tokens_mean", "truncated")}
    return {**metrics, **component_means(samples["components"]), **metrics}  # a component cannot override these


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimates, without bias, the probability that one of `k` samples passes, if c of n passed (arXiv 2107.03374)."""
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. `metrics` are named `eval/<set>/<metric>`."""

    stamp: PolicyStamp
    metrics: dict[str, float]
    directory: Path


def eval_config(config: Config, checkpoint: Path, out: Path | None) -> Config:
    """Returns `config`, changed to evaluate `checkpoint` in `out` or, by default, in a new directory in its run's.

    `checkpoint` is one of a run, or a model directory in the Hugging Face format.

    Raises:
        NotFound: `checkpoint` is neither a checkpoint nor a model.
        InvalidInput: `checkpoint` is a run's directory, `out` is not empty, or the config has no set to evaluate.
    """
    if not config.data.eval:
        raise InvalidInput("data.eval is empty: there is nothing to evaluate", field="data.eval")
    is_checkpoint = _is_checkpoint(checkpoint)
    name = f"eval-{checkpoint.resolve().name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    directory = out or (_run_of(checkpoint) or config.run_dir) / name
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidInput(f"--out: {directory} exists and is not an empty directory; choose another", field="out")
    start = {"resume": str(checkpoint)} if is_checkpoint else {"resume": "never", "model": str(checkpoint)}
    changes: dict[str, object] = {"loss": config.trainer.loss.model_copy(update={"kl_coef": 0.0})}
    if not is_checkpoint:  # whose weights would be those of the run's start, converted
        changes["megatron"] = config.trainer.megatron.model_copy(update={"dist_checkpointing_path": ""})
    policy = config.trainer.model_copy(update=changes)
    alone = {"trainer": policy, "advantage": AdvantageConfig(), "critic": None, "teacher": None}  # opens no other model
    place = {"runs_dir": directory.parent, "name": directory.name, "observability": config.observability.quiet()}
    return config.model_copy(update={**place, **start, **alone})


def load_config(checkpoint: Path, arguments: Sequence[str], *, model_is_remote: bool) -> Config:
    """Returns the config of `arguments`, or of the run that made `checkpoint` if they name no file.

    Raises:
        NotFound: As of `with_own_config`, or the run's config has a path that is not there.
        InvalidInput: As of `with_own_config`, the config is invalid, or the run was a supervised one.
    """
    own, *_ = files = with_own_config(checkpoint, arguments)
    if len(files) > len(arguments) and isinstance(load_any([own]), SftConfig):
        message = f"{checkpoint} is of a run of `lockstep sft`, which has no scorers: give a config of `lockstep run`"
        raise InvalidInput(f"{message} as well, whose data.eval and reward are then used", field="config")
    config = load(Config, files)
    if len(files) > len(arguments):
        has_model = model_is_remote or not _is_checkpoint(checkpoint)
        paths = {} if has_model else {"model": Path(config.model)}
        paths |= {f"data.eval.{name}": path for name, path in config.data.eval.items()}
        require_own_paths(own, paths, arguments)
    return config


def with_own_config(checkpoint: Path, arguments: Sequence[str]) -> list[str]:
    """Returns `arguments`, after the config of the run that made `checkpoint` if they name no file.

    Raises:
        NotFound: There is no checkpoint, or no config of its run.
        InvalidInput: `checkpoint` is a run's directory.
    """
    if not all(map(is_override, arguments)):
        return [*arguments]
    _is_checkpoint(checkpoint)
    at = checkpoint.resolve().parent
    run_dir = at.parent if at.name == CHECKPOINTS else at
    own = run_dir / "config.json"
    if not (run_dir / LEDGER).is_file() or not own.is_file():
        raise NotFound(f"{checkpoint} is in no run's directory: give the config of a run as well", field="config")
    return [str(own), *arguments]


def _run_of(checkpoint: Path) -> Path | None:
    checkpoints = checkpoint.resolve().parent
    is_of_run = checkpoints.name == CHECKPOINTS and (checkpoints.parent / LEDGER).is_file()
    return checkpoints.parent if is_of_run else None


def _is_checkpoint(path: Path) -> bool:
    """Returns True if `path` is a checkpoint, False if it is a model. Raises like `eval_config` if it is neither."""
    if (path / CHECKPOINTS).is_dir() or (path / LEDGER).is_file():
        made = [*sorted((path / CHECKPOINTS).glob("*")), *path.glob("model")]
        has = ", ".join(str(one.relative_to(path)) for one in made) or "neither: checkpoint.save_freq makes checkpoints"
        message = f"{path} is a run's directory: give one of its checkpoints or its model; it has {has}"
        raise InvalidInput(message, field="checkpoint")
    if (path / "manifest.json").is_file():
        return True
    if not (path / "config.json").is_file():
        what = "has neither manifest.json nor config.json" if path.is_dir() else "is not a directory"
        raise NotFound(f"{path} {what}: give a checkpoint of a run or a model directory", field="checkpoint")
    return False


async def eval_session(config: Config, external: Addresses, console: Console) -> Evaluation:
    """Runs the evaluation that `eval_config` set up. Services without an address are started and stopped with it.

    Raises:
        LockstepError: The first failure of any part.
    """
    cancel_on_sigterm()
    data = load_if_local(
        config, partial(_load, tools=known_tools(config, external)), model_is_remote=bool(external.trainer)
    )
    async with recorded_run(config, console) as run, running_services(run, external) as addresses:
        evaluated = run.resume_from or config.model
        console.print(f"evaluating {evaluated} in {config.run_dir}", soft_wrap=True)
        async with open_services(run, addresses) as services:
            return await _evaluate(run, services, data, evaluated)


def show_evaluation(evaluation: Evaluation, console: Console) -> None:
    sets: dict[str, dict[str, float]] = {}
    for path, value in evaluation.metrics.items():
        name, _, metric = path.removeprefix("eval/").rpartition("/")
        sets.setdefault(name, {})[metric] = value
    table = Table(f"step {evaluation.stamp.version}", *sets)
    for metric in dict.fromkeys(metric for metrics in sets.values() for metric in metrics):
        table.add_row(metric, *(f"{metrics[metric]:.3f}" if metric in metrics else "" for metrics in sets.values()))
    console.print(table)
    console.print(f"metrics.json and all samples (Parquet) are in {evaluation.directory}", soft_wrap=True)


_Dataset = tuple[Tokenizer, Tools | None, dict[str, Prompts]]


def _load(config: Config, tokenizer: Tokenizer, *, tools: Tools | None) -> _Dataset:
    check_words(tokenizer, config)
    return tokenizer, tools, load_held_out(config, tokenizer, tools)


async def _evaluate(run: Run, services: Services, data: _Dataset | None, evaluated: str) -> Evaluation:
    config, trainer = run.config, services.trainer
    version = trainer.opened.version
    if data is None or data[1] != services.tools:
        data = load_from_card(config, trainer.opened.model_card, partial(_load, tools=services.tools))
    tokenizer, _, eval_data = data
    run.begin(version, ())
    stamp = await make_publisher(services, run).publish(version)
    metrics = await evaluate(run, make_collector(services, tokenizer, config), eval_data, stamp)
    result = {"checkpoint": evaluated, "version": version, "digest": stamp.digest, "metrics": metrics}
    write_whole(config.run_dir / "metrics.json", json.dumps(result, indent=1) + "\n")
    return Evaluation(stamp, metrics, config.run_dir)
