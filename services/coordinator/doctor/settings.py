"""Checks settings of a config that only fail once services have started: scorers, engine arguments, lengths, memory."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

from services.common.config.load import AnyConfig
from services.common.config.operation import ObservabilityConfig, TrackerConfig
from services.common.config.reward import RewardConfig
from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.common.errors import InvalidInput, LockstepError, PreconditionFailed
from services.common.families.architecture import read_content
from services.common.families.supported import rope_kinds, text_of
from services.common.memory import CGROUP, MEMINFO, usable_memory
from services.common.process import require_suffix_decoding
from services.coordinator.clients.gpus import visible_gpus
from services.coordinator.data.prompts import Prompt
from services.coordinator.doctor import Finding, Verdict
from services.coordinator.fleet.launch import Addresses, starts_replicas
from services.coordinator.fleet.probes import ENGINE, FUNCTIONS, SCORERS, Probe, problem
from services.coordinator.observe.reporters import make_metrics, open_otel
from services.coordinator.observe.trackers import without_store
from services.coordinator.planning.memory import rank_memory
from services.coordinator.planning.plan import check_model, planned_model

_PROBE_TIMEOUT_S = 600.0  # importing vLLM takes minutes on a busy host
_GIB = 2**30
_ELSEWHERE = ("judge", "http", "model")  # a call of these costs, or needs what this host may lack
_NUM_TRIED_ROWS = 4
_NEVER_LONGER = {"default", "llama3"}  # rotary embeddings with which every vLLM keeps to max_position_embeddings


def examine_settings(config: AnyConfig, addresses: Addresses) -> Iterator[Finding]:
    """Checks the settings of the services that would be started here."""
    if isinstance(config, Config):
        if starts_replicas(config, addresses) and config.rollout.engine:
            yield check_engine(config)
        speculation = config.rollout.speculation
        if starts_replicas(config, addresses) and speculation and speculation.kind == "suffix":
            yield check_suffix_decoding()
    if keys := _float8_keys(config, addresses):
        yield check_float8(keys)
    if functions := _functions(config, addresses):
        yield check_functions(functions)
    yield from check_observability(config.observability)
    yield from map(check_tracker, config.observability.trackers)
    if (Path(config.model) / "config.json").is_file():
        yield from check_lengths(config)
        if not addresses.trainer:
            yield from check_memory(config, MEMINFO, CGROUP)


def examine_scorers(config: Config, addresses: Addresses, prompts: Iterable[Prompt]) -> Iterator[Finding]:
    """Starts the scorers of a run that starts its reward service here, and lets them score the first rows."""
    here = tuple(scorer for scorer in config.reward.scorers if scorer.kind not in _ELSEWHERE)
    if here and not addresses.reward:
        # What a policy may write: the answer itself, and nothing. In an environment, a completion is an episode.
        rows = [] if config.environment else [_item(prompt, config) for prompt in islice(prompts, _NUM_TRIED_ROWS)]
        groups = [[row, {**row, "completion": "", "num_tokens": 0, "tokens": []}] for row in rows]
        yield check_scorers(config.reward.model_copy(update={"scorers": here}), groups)


def _item(prompt: Prompt, config: Config) -> dict[str, object]:
    answer = prompt.answer or ""
    return {
        "prompt": prompt.text,
        "answer": answer,
        "extra": prompt.extra,
        "completion": answer,
        "num_tokens": len(answer.split()),
        "tokens": list(range(len(answer.split()))),
        "finish_reason": "stop",
        "messages": prompt.messages if prompt.messages[0]["role"] else (),
        "answer_column": config.data.answer_column,
        "answer_is_integer": prompt.answer_is_integer,
    }


_FIXES = {
    "group_timeout_s": "raise reward.group_timeout_s, or ",
    "TIMEOUT": "raise reward.timeout_s, or ",
    # The function is one of TRL's, which reads completion[0]["content"].
    "string indices must be integers": "set data.chat, so that prompts and completions are messages and not text, or ",
}
"""What to do about a scorer's failure with these words."""


def check_scorers(reward: RewardConfig, groups: Sequence[Sequence[Mapping[str, object]]] = ()) -> Finding:
    """Checks that scorers start, in workers as in a run, and that they can score `groups` of samples.

    The first sample of each group must have a reward. Only a warning says that others, or some of the first, have none.
    """
    paths = [scorer.path for scorer in reward.scorers if scorer.kind == "python"]
    try:
        with Probe(SCORERS) as probe:
            request = {"reward": reward.model_dump_json(), "groups": groups}
            outcomes = probe.ask(request, _PROBE_TIMEOUT_S)["outcomes"]
    except LockstepError as error:
        fix = "run in the directory from which the module can be imported, or install it where the reward service runs"
        fix = fix_of(error.message, fix, "path and kwargs in reward.scorers") if paths else "correct reward.scorers"
        return Finding("scorers", error.message, Verdict.FAIL, fix)
    samples = [sample for group in groups for sample in group]
    failed = [(sample, one["failure"]) for sample, one in zip(samples, outcomes, strict=True) if "failure" in one]
    if not failed:
        found = [f"imported {path}" for path in paths] or ["started"]
        rewards = ", ".join(f"{outcome['reward']:g}" for outcome in outcomes[::2])
        found += [f"the answers of the first rows have rewards {rewards}" if rewards else "no row was scored"]
        return Finding("scorers", "; ".join(found))
    sample, why = failed[0]
    which = f"for the completion {sample['completion']!r:.80} of the prompt {sample['prompt']!r:.80}"
    fix = next((fix for words, fix in _FIXES.items() if words in why), "")
    return Finding(
        "scorers",
        f"{why}, {which}; {len(failed)} of {len(samples)} samples made of the first rows fail",
        Verdict.FAIL if all("failure" in outcome for outcome in outcomes[::2]) else Verdict.WARN,
        f"{fix}correct the function, if it is yours, or the rows" if paths else f"{fix}correct the rows",
    )


Function = tuple[str, Sequence[str], Mapping[str, object]]
"""Path, names of the positional arguments, and keyword arguments."""


def check_functions(functions: Mapping[str, Function]) -> Finding:
    """Checks that the user's functions can be imported and take their arguments. `functions` has them by config key."""
    if why := problem(FUNCTIONS, functions, _PROBE_TIMEOUT_S):
        fix = "run in the directory that has the module, or install it where trainer and coordinator run"
        return Finding("functions", why, Verdict.FAIL, fix_of(why, fix, "import_path and kwargs"))
    return Finding("functions", f"imported {', '.join(path for path, _, _ in functions.values())}")


def check_observability(settings: ObservabilityConfig) -> Iterator[Finding]:
    """Checks where metrics are served and spans are sent, without a listener or a call."""
    for check, value, opens in (
        ("metrics", settings.metrics_address, make_metrics),
        ("spans", settings.otel_endpoint, _try_otel),
    ):
        try:
            if value:
                opens(settings)
                yield Finding(check, value)
        except InvalidInput as error:
            yield Finding(check, error.message, Verdict.FAIL, "correct it, or leave it out")


def _try_otel(settings: ObservabilityConfig) -> None:
    if otel := open_otel(settings):
        otel.close()


def check_tracker(tracker: TrackerConfig) -> Finding:
    """Checks that the tracker's package can be imported, that W&B has a key if it is to use the network, and whether
    MLflow can keep runs."""
    try:
        import_module(tracker.kind)
    except Exception as error:  # noqa: BLE001 a broken installation may raise anything
        fix = f"pip install 'lockstep-rl[{tracker.kind}]'"
        return Finding("tracker", f"{tracker.kind} cannot be imported: {error}", Verdict.FAIL, fix)
    if tracker.kind == "wandb" and tracker.mode == "online" and not _has_wandb_key():
        return Finding("tracker", "wandb has no API key", Verdict.FAIL, "`wandb login`, or `mode: offline`")
    if fix := without_store(tracker):
        return Finding("tracker", "mlflow-skinny has no uri, and may have nowhere to keep runs", Verdict.WARN, fix)
    return Finding("tracker", f"imported {tracker.kind}")


def _has_wandb_key() -> bool:
    """Returns whether W&B finds a key in the environment, or where `wandb login` writes it."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    own = os.environ.get("NETRC")
    for path in [Path(own)] if own else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with contextlib.suppress(OSError, NetrcParseError):
            if netrc(path).authenticators(host):
                return True
    return False


def fix_of(why: str, of_missing_module: str, keys: str) -> str:
    """Returns the advice for user's code that cannot be used; `keys` are those that name it and its arguments."""
    if re.search(r"No module named '[^']*\.py'", why):
        return f"write MODULE:FUNCTION without .py in {keys.partition(' and ')[0]}, such as my_module:my_function"
    return of_missing_module if "No module named" in why else f"correct your code, or {keys}"


def _functions(config: AnyConfig, addresses: Addresses) -> dict[str, Function]:
    loss, functions = config.trainer.loss, dict[str, Function]()
    if loss.import_path and not addresses.trainer:
        functions["trainer.loss.import_path"] = loss.import_path, ("tokens", "config"), loss.kwargs
    if isinstance(config, Config) and config.advantage.import_path:
        kwargs = config.advantage.kwargs
        functions["advantage.import_path"] = config.advantage.import_path, ("samples", "config"), kwargs
    return functions


def check_engine(config: Config, command: Sequence[str] = ENGINE) -> Finding:
    """Checks that vLLM has the arguments in rollout.engine."""
    if find_spec("vllm") is None:
        return Finding("engine arguments", "not checked: vLLM is not installed here")
    if why := problem(command, config.rollout.engine, _PROBE_TIMEOUT_S):
        return Finding("engine arguments", why, Verdict.FAIL, "see EngineArgs in vLLM's documentation")
    return Finding("engine arguments", ", ".join(sorted(config.rollout.engine)))


def _float8_keys(config: AnyConfig, addresses: Addresses) -> list[str]:
    keys: list[str] = []
    if isinstance(config, Config) and starts_replicas(config, addresses) and config.rollout.quantized_key:
        keys.append(f"rollout.{config.rollout.quantized_key}")
    if not addresses.trainer and config.trainer.strategy == "megatron" and config.trainer.megatron.fp8 != "none":
        keys.append("trainer.megatron.fp8")
    return keys


def check_float8(keys: Sequence[str]) -> Finding:
    """Checks that this host has GPUs; the services check on start that these have float8."""
    with contextlib.suppress(LockstepError):  # reported by the check of GPUs
        if not visible_gpus():
            fix = "leave the keys out, or use hosts with GPUs of compute capability 8.9 or above"
            return Finding("float8", f"this host has no GPU for {' and '.join(keys)}", Verdict.FAIL, fix)
    return Finding("float8", f"{' and '.join(keys)}: needs GPUs of compute capability 8.9 or above")


def check_suffix_decoding() -> Finding:
    try:
        require_suffix_decoding()
    except PreconditionFailed as error:
        return Finding("suffix decoding", error.message, Verdict.FAIL, "install it, or set kind ngram")
    return Finding("suffix decoding", "arctic-inference is installed")


def check_lengths(config: AnyConfig) -> Iterator[Finding]:
    """Compares the longest samples with the number of positions that the model was made for."""
    content = text_of(read_content(config.model))
    limit = content.get("max_position_embeddings")
    if not isinstance(limit, int):
        return
    if is_sft := isinstance(config, SftConfig):
        key, length = "data.max_tokens", config.data.max_tokens
    else:
        key, length = "rollout.max_model_len", config.rollout.max_model_len
    lengths = f"{key} {length}, the model's max_position_embeddings {limit}"
    if length <= limit:
        yield Finding("lengths", lengths)
    else:
        is_scaled = rope_kinds(content) - _NEVER_LONGER
        verdict = Verdict.WARN if is_sft or is_scaled else Verdict.FAIL
        fix = f"set {key} to at most {limit}; vLLM refuses more unless rope is scaled (new versions refuse it of yarn)"
        yield Finding("lengths", lengths, verdict, fix)


def check_memory(config: AnyConfig, meminfo: Path, cgroup: Path) -> Iterator[Finding]:
    """Compares the estimated peak of all ranks with the memory of this host or its container, if they compute on its
    CPU."""
    try:
        if visible_gpus() or (memory := usable_memory(meminfo, cgroup)) is None:
            return
        check_model(config)
        model = planned_model(config)
        peaks = [rank.peak for rank in rank_memory(config, model, is_gpu=False).values()]
    except LockstepError:  # reported by the checks of GPUs and of the model
        return
    total, free = memory
    needed = sum(peaks) * config.trainer.num_ranks / len(peaks) / _GIB
    sizes = (
        f"the trainer needs about {needed:.1f} GiB; this host has {total:.1f} for it, of which {free:.1f} are available"
    )
    fix = "lower trainer.max_tokens_per_microbatch or set trainer.gradient_checkpointing; `lockstep plan` has the parts"
    verdict = Verdict.OK if needed <= free else Verdict.WARN if needed <= total else Verdict.FAIL
    yield Finding("memory", sizes, verdict, fix if verdict is not Verdict.OK else "")
