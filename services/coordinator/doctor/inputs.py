"""Checks what a run reads and plays: its models and data, and short episodes of its environment."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from google.protobuf.json_format import ParseDict
from lockstep.reward.v1.agent_pb2 import Begin, PlayRequest
from lockstep.reward.v1.environment_pb2 import Message

from services.common.config.agent_rules import prompt_text
from services.common.config.environment import AgentEnvironmentConfig, EnvironmentConfig, TurnsConfig
from services.common.config.load import AnyConfig, role_models
from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.common.config.trainer import TrainerConfig
from services.common.errors import DeadlineExceeded, InvalidInput, LockstepError, NotFound, counted
from services.common.families.architecture import make_architecture, read_content
from services.common.families.registry import FAMILIES
from services.common.families.supported import ASK_FSDP, choose
from services.common.json_values import JsonObject
from services.common.model_card import full_config, read_model_card, require_shapes, whole_weights
from services.coordinator import sft
from services.coordinator.clients.environment import row_of
from services.coordinator.clients.gpus import visible_gpus
from services.coordinator.compat import import_transformers
from services.coordinator.data.dialog import Dialog, OverlongPrompt
from services.coordinator.data.order import environment_seed
from services.coordinator.data.prompts import Prompt
from services.coordinator.data.reading.hub import ConfigT, with_local_models
from services.coordinator.doctor import Finding, Verdict
from services.coordinator.doctor.settings import fix_of
from services.coordinator.fleet import probes
from services.coordinator.fleet.launch import Addresses
from services.coordinator.planning.plan import check_model
from services.coordinator.rl import session as rl
from services.coordinator.text.cards import require_same_tokens, require_teacher
from services.coordinator.text.tokenizer import Tokenizer

_MAX_CHARS = 400
_LOOK_S = 60.0


def check_weights(config: AnyConfig, addresses: Addresses, *, may_download: bool = False) -> None:
    """Checks that the models that a trainer of this host will load have all their weights.

    Those of a trainer with an address are on its host. With `may_download`, a model in the Hub's cache may lack its
    weights, which the run will download.

    Raises:
        NotFound: The directory of a model is missing.
        InvalidInput: A file is missing or damaged.
    """
    for name, settings, directory in role_models(config):
        if not (directory.is_dir() or addresses.of(name)):
            key = "model" if name == "trainer" else f"{name}.model"
            raise NotFound(f"{key}: directory {directory} does not exist", field=key)
        # Megatron reads its own format then, and only the config and the tokenizer of the directory.
        is_converted = settings.strategy == "megatron" and bool(settings.megatron.dist_checkpointing_path)
        in_cache = directory.parent.name == "snapshots"  # of the Hub: models--OWNER--NAME/snapshots/REVISION
        is_left = may_download and in_cache and not any(directory.glob("*.safetensors"))
        if directory.is_dir() and not (addresses.of(name) or is_converted or is_left):
            _check_tensors(directory, is_critic=name == "critic")


def _check_tensors(directory: Path, *, is_critic: bool) -> None:
    stored, content, source = whole_weights(directory), read_content(directory), f"{directory}/config.json"
    if content.get("model_type") not in FAMILIES:
        return  # the trainer's code knows the tensors
    import_transformers()
    model = make_architecture(full_config(content, source), source)
    expected = model.checkpoint_shapes()
    if is_critic:  # whose head is made for it
        expected.pop(model.family.output.tensors[0], None)
    elif model.tie_word_embeddings and model.family.output.tensors[0] in stored:
        expected.pop(model.family.embedding.tensors[0])  # transformers takes either
    require_shapes(stored, expected, directory)


def with_checked_models(config: ConfigT, addresses: Addresses, *, has_weights: bool = True) -> ConfigT:
    """Returns `config` with directories in place of models on the Hub, unless the trainer is at an address.

    Without `has_weights`, those of the Hub are not downloaded and not checked.
    """
    local = config if addresses.trainer else with_local_models(config, has_weights=has_weights)
    check_model(local)
    check_weights(local, addresses, may_download=not has_weights)
    return local


def _ask_trainer(config: AnyConfig, addresses: Addresses) -> Iterator[Finding]:
    """Asks the trainer's code whether it computes the models exactly, in a process with torch, as it will at start.

    For the families of the registry the rules of check_model are the answer, unless adapters have targets or mbridge
    builds the model. Yields what will compute attention.
    """
    for name, settings, directory in role_models(config):
        if addresses.of(name) or not directory.is_dir():
            continue
        has_targets = settings.lora.rank and (settings.lora.target_modules or settings.lora.exclude_modules)
        is_bridged = settings.strategy == "megatron" and settings.megatron.use_mbridge
        content = read_content(directory)
        answer: probes.Answer = {}
        if content.get("model_type") not in FAMILIES or has_targets or is_bridged:
            if find_spec("torch") is None:
                why = f"{directory}: torch is not here to compare it with transformers"
                yield Finding("model", why, Verdict.WARN, "")
                return
            answer = probes.describe_model(str(directory), settings)
        attention = answer["attention"] if "attention" in answer else _attention(settings, content)
        yield Finding("attention", f"{name}: {attention or 'no layer attends'}")


def _attention(settings: TrainerConfig, content: JsonObject) -> str:
    """Names what computes attention on this host for a family of the registry, none of which caps its scores."""
    device = "cuda" if visible_gpus() else "cpu"
    if settings.strategy == "megatron":
        return "the kernel that TransformerEngine chooses" if device == "cuda" else "torch's operators, by samples"
    is_auto = settings.compute_dtype == "auto"
    dtype = {"cuda": "bfloat16", "cpu": "float32"}[device] if is_auto else settings.compute_dtype
    return choose(device, dtype, make_architecture(content, "config.json").head_dim)


def _fix_of_model(config: AnyConfig, problem: str, field: str) -> str:
    """Returns what to do about a model that is refused; asks whether strategy fsdp supports what megatron does not."""
    if field != "model":
        return f"correct {field}"
    fix = "set model to a directory in the Hugging Face format that this strategy can train"
    if not problem.endswith(ASK_FSDP) or find_spec("torch") is None:
        return fix
    try:
        for _, settings, directory in role_models(config):
            probes.describe_model(str(directory), TrainerConfig(compute_dtype=settings.compute_dtype))
    except LockstepError as error:
        return f"{fix}; strategy fsdp does not support it either: {error.message}"
    return "set strategy to fsdp, which was compared with transformers and supports it"


def examine_inputs(
    config: AnyConfig, addresses: Addresses, loaded: list[rl.Dataset] | None = None
) -> Iterator[Finding]:
    """Checks that the run would accept its model and data, if they are on this host. Adds the data to `loaded`."""
    if addresses.trainer and not Path(config.model).is_dir():
        yield Finding("model", f"{config.model} is not on this host; model and data were not checked")
        return
    try:
        read_model_card(config.model)
        check_model(config)
        check_weights(config, addresses, may_download=True)
        yield from _ask_trainer(config, addresses)
    except LockstepError as error:
        field = error.metadata.get("field") or "model"
        yield Finding("model", error.message, Verdict.FAIL, _fix_of_model(config, error.message, field))
        if field == "model":
            yield Finding("data", "not read without the model's tokenizer", Verdict.WARN, "see above")
            return
    else:
        yield Finding("model", config.model)
    if isinstance(config, Config):
        yield from _check_tokens(config)
        if config.teacher:
            yield check_teacher(config)
    try:
        yield from _rows(config, addresses) if isinstance(config, SftConfig) else _prompts(config, addresses, loaded)
    except LockstepError as error:
        field = error.metadata.get("field", "")
        fix = f"correct {field or 'data'}, or the rows of its files"
        if field == "model":
            fix = "set model to a directory that has the files of its tokenizer, tokenizer.json among them"
        yield Finding("data", error.message, Verdict.FAIL, fix)


def _check_tokens(config: Config) -> Iterator[Finding]:
    """Compares the tokens of a reference and a critic with models of their own, which are on this host."""
    models = {name: section.model for name, section in config.role_sections.items() if name != "teacher"}
    here = {name: model for name, model in models.items() if model and Path(model).is_dir()}
    for name, model in here.items() if Path(config.model).is_dir() else ():
        try:
            require_same_tokens(read_model_card(config.model), read_model_card(model), name)
        except LockstepError as error:
            yield Finding(name, error.message, Verdict.FAIL, f"choose another {name}.model")


def check_teacher(config: Config) -> Finding:
    """Checks that the teacher can score the policy's tokens, if both models are on this host."""
    assert config.teacher and config.teacher.model, "the config has a teacher"
    teacher = Path(config.teacher.model)
    if not (teacher.is_dir() and Path(config.model).is_dir()):
        return Finding("teacher", f"{teacher} or {config.model} is not on this host; tokenizers were not compared")
    try:
        cards = read_model_card(config.model), read_model_card(teacher)
        top_k = config.trainer.loss.distill.used_top_k
        require_teacher(*cards, max_model_len=config.rollout.max_model_len, top_k=top_k)
    except LockstepError as error:
        field = error.metadata.get("field", "")
        fix = f"correct {field}" if field.startswith("trainer.") else "choose another teacher.model"
        return Finding("teacher", error.message, Verdict.FAIL, fix)
    return Finding("teacher", f"{teacher}, with the tokenizer of the policy")


def _rows(config: SftConfig, addresses: Addresses) -> list[Finding]:
    data = sft.load_data(config, addresses)
    assert data is not None, "the model is on this host"
    first, decode = data.train.examples[0], partial(data.tokenizer.decode, skip_special_tokens=False)
    prompt, trained = decode(first.prompt_tokens.tolist()), decode(first.tokens[first.loss_mask].tolist())
    num_steps = config.num_steps or data.train.num_steps(config.num_epochs or 0)
    num_read = num_steps * config.data.samples_per_step
    return [
        _sizes(data.train, data.held_out, "row", config.evaluation.eval_freq),
        Finding("first row", f"{counted(first.num_tokens, 'token')}: {shown(prompt)}; trained on: {shown(trained)}"),
        _steps(num_steps, num_read, len(data.train), "row"),
    ]


def _prompts(config: Config, addresses: Addresses, loaded: list[rl.Dataset] | None) -> list[Finding]:
    data = rl.load_data(config, addresses)
    assert data is not None, "the model is on this host"
    first, num_read = data.train.prompts[0], config.num_steps * config.data.prompts_per_step
    if loaded is not None:
        loaded.append(data)
    answer = f"; answer: {shown(first.answer)}" if first.answer is not None else ""
    sent = data.tokenizer.decode(first.tokens, skip_special_tokens=False)
    return [
        _sizes(data.train, data.eval, "prompt", config.evaluation.eval_freq),
        Finding("first prompt", f"{counted(len(first.tokens), 'token')}: {shown(sent)}{answer}"),
        _steps(config.num_steps, num_read, len(data.train), "prompt"),
    ]


def _sizes(train: Sized, held_out: Mapping[str, Sized], noun: str, eval_freq: int) -> Finding:
    others = "".join(f", {len(rows)} held out in {name}" for name, rows in held_out.items())
    unused = "; not evaluated after a step: evaluation.eval_freq is 0" if held_out and not eval_freq else ""
    return Finding("data", f"{counted(len(train), noun)}{others}{unused}")


def _steps(num_steps: int, num_read: int, num_rows: int, noun: str) -> Finding:
    verb = "reads" if num_steps == 1 else "read"
    steps = f"{counted(num_steps, 'step')} {verb} {counted(num_read, noun)}"
    return Finding("steps", f"{steps}, {num_read / num_rows:.3g} epochs, if every one is used")


def shown(text: str) -> str:
    """Returns a text, or its beginning and end, as a Python literal, in which every character is printable."""
    half = _MAX_CHARS // 2
    return repr(text) if len(text) <= _MAX_CHARS else f"{text[:half]!r} ... {text[-half:]!r}"


_FIXES = {
    "python": "run in the directory from which the module can be imported, or install it where the reward service runs",
    "tools": "check environment.tools, and that their files and packages are where the reward service runs; "
    "lockstep env try shows what an MCP server says",
    "textarena": "pip install 'lockstep-rl[environments]' where the reward service runs; check environment.game",
    "reasoning_gym": "pip install 'lockstep-rl[environments]' where the reward service runs; check environment.task",
    "agent": "check environment.path, command, files and mounts, where the reward service runs",
    "openenv": "start the OpenEnv server, and check environment.url and any firewall in between",
}


def examine_environment(config: Config, addresses: Addresses, data: rl.Dataset | None = None) -> Iterator[Finding]:
    """Opens the environment of a run that starts its reward service here, and plays its first prompt."""
    if config.environment is None:
        return
    if addresses.reward:
        yield Finding("environment", "not opened: it runs where the reward services do")
        return
    if config.environment.kind == "agent":
        yield check_agent(config.environment)
        has_prompt = any("{prompt}" in word for word in config.environment.command)
        if data and has_prompt and prompt_text(data.train.prompts[0].row_prompt) is None:
            why = "{prompt} in environment.command is a text or one message of a user, and the first row has others"
            fix = "leave {prompt} out, and let the program read the file that LOCKSTEP_ROW names"
            yield Finding("agent's prompt", why, Verdict.FAIL, fix)
        return
    calls, talks = [], None
    if data:
        prompt = data.train.prompts[0]
        talks = partial(_check_dialog, data.tokenizer, config, prompt)
        begin = {"reset": row_of(prompt), "seed": environment_seed(config.seed, prompt.prompt_id)}
        # A turn that the environment may expect, and the shortest that a policy can write.
        calls = [begin, {"step": prompt.answer or ""}, begin, {"step": ""}]
    yield check_environment(config.environment, calls=calls, talks=talks)


def _check_dialog(
    tokenizer: Tokenizer, config: Config, prompt: Prompt, opened: probes.Answer, answers: Sequence[probes.Answer]
) -> None:
    dialog = Dialog(tokenizer, opened["tools"], config)
    dialog.check(opened["roles"])
    # A reset and a step, twice; nothing where the environment failed.
    said = [[ParseDict(dict(message), Message()) for message in answer.get("messages", ())] for answer in answers]
    with suppress(OverlongPrompt) if config.data.overlong == "drop" else nullcontext():
        dialog.begin(prompt, said[0])
    for reply in said[1::2]:
        dialog.reply(prompt.tokens, reply)


# Prints where the agent's program is in the sandbox and, for a Python, which clients it has.
_LOOK = """command -v "$0" || exit 1
case "${0##*/}" in python*) "$0" -c "
import importlib.util as u
print(*(name for name in ('openai', 'anthropic') if u.find_spec(name)))";; esac"""


def check_agent(environment: AgentEnvironmentConfig) -> Finding:
    """Checks that an agent's function can be imported, or that its program and files are there in its sandbox."""
    if environment.url:
        return Finding("environment", f"agent at {environment.url}: not called, because each call is an episode")
    looks = {"setup": (), "collect": (), "episode_s": _LOOK_S, "max_memory_gib": max(1.0, environment.max_memory_gib)}
    if environment.command:
        looks["command"] = ("/bin/sh", "-c", _LOOK, environment.command[0])
    try:
        with probes.AgentProbe(environment.model_copy(update=looks)) as probe:
            version = probe.open()["version"]
            if environment.path:
                return Finding("environment", f"{version}: {environment.path} can be imported")
            last = probe.play(PlayRequest(begin=Begin(episode_id="doctor", row_json="{}")))
    except LockstepError as error:
        return _failed(environment, error.message)
    if last.HasField("failure"):
        return _failed(environment, last.failure.message)
    program, _, clients = last.end.text.strip().partition("\n")
    if last.end.exit_code:
        fix = "name a program that the sandbox has, or add its directory to environment.mounts"
        why = f"agent: the sandbox has no program {environment.command[0]}"
        if environment.setup:
            return Finding(
                "environment", f"{why} before environment.setup", Verdict.WARN, f"if setup does not make it: {fix}"
            )
        return Finding("environment", why, Verdict.FAIL, fix)
    has = f", with {clients.replace(' ', ' and ')}" if clients else ""
    return Finding("environment", f"{version}: its sandbox runs {program}{has}")


def check_environment(
    environment: TurnsConfig,
    command: Sequence[str] = probes.ENVIRONMENT,
    timeout_s: float = probes.OPEN_TIMEOUT_S,
    calls: Sequence[Mapping[str, object]] = (),
    talks: Callable[[probes.Answer, Sequence[probes.Answer]], None] | None = None,
) -> Finding:
    """Checks that the environment opens and answers `calls`; shows its name, version and tools.

    `talks` raises InvalidInput if the model cannot read the messages of the environment that has opened and answered.
    """
    try:
        with probes.EnvironmentProbe(environment, command) as probe:
            try:
                opened = probe.open(timeout_s)
            except DeadlineExceeded:
                why = f"{environment.kind}: it did not open within {timeout_s:g} s"
                fix = "a large corpus takes long; otherwise see the module's imports"
                return Finding("environment", why, Verdict.WARN, fix)
            answers = [probe.play(call) for call in calls]
    except LockstepError as error:
        return _failed(environment, error.message)
    try:
        if talks:
            talks(opened, answers)
    except InvalidInput as error:
        return Finding("environment", error.message, Verdict.FAIL, f"correct {error.metadata.get('field')}")
    if problem := _problem(environment, calls, answers):
        return problem
    names = [schema["function"]["name"] for schema in opened["tools"]]
    tools = f", tools {', '.join(names)}" if names else ""
    result = f"{environment.kind} {opened['version']} opens{tools}{', and plays' * bool(calls)}"
    return Finding("environment", result)


def _problem(
    environment: TurnsConfig, calls: Sequence[Mapping[str, object]], answers: Sequence[probes.Answer]
) -> Finding | None:
    """Returns what is wrong with the answers. A step may be at fault alone, if it fails only with some texts."""
    whys = [answer.get("failure", {}).get("message") for answer in answers]
    resets, steps = ([pair for pair in zip(calls, whys, strict=True) if name in pair[0]] for name in ("reset", "step"))
    for name, played in (("reset", resets[:1]), ("step", steps)):
        if played and all(why for _, why in played):
            return _failed(environment, f"{name}: {played[0][1]}")
    fix = "answer any text in step: the policy may write it, and a failure is no reward and drops the prompt group"
    for call, why in steps:
        if why:
            return Finding("environment", f"step({shown(str(call['step']))}): {why}", Verdict.WARN, fix)
    return None


def _failed(environment: EnvironmentConfig, why: str) -> Finding:
    fix = _FIXES[environment.kind]
    if environment.kind == "python":
        fix = fix_of(why, fix, "environment.path and environment.kwargs")
    return Finding("environment", f"{environment.kind}: {why}", Verdict.FAIL, fix)
