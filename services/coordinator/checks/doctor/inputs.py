"""Checks the model and data of a config with the same early checks that a run makes."""

from collections.abc import Iterator, Mapping, Sized
from pathlib import Path

from services.common.config.reading.load import AnyConfig
from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.common.counted import counted
from services.common.errors import LockstepError
from services.common.files.model_card import read_model_card
from services.coordinator.checks.doctor.finding import Finding, Verdict
from services.coordinator.checks.plan import check_model
from services.coordinator.checks.weights import check_weights
from services.coordinator.data.prompts import Prompt
from services.coordinator.rl import session as rl
from services.coordinator.services.launch import Addresses
from services.coordinator.sft import session as sft

_MAX_CHARS = 400


def examine_inputs(config: AnyConfig, given: Addresses, prompts: list[Prompt] | None = None) -> Iterator[Finding]:
    """Checks that the run would accept its model and data, if they are on this host. Adds the first prompt to
    `prompts`.
    """
    if given.trainer and not Path(config.model).is_dir():
        yield Finding("model", f"{config.model} is not on this host; model and data were not checked")
        return
    try:
        read_model_card(config.model)
        check_model(config)
        check_weights(config, given, may_download=True)
    except LockstepError as error:
        fix = "set model to a directory in the Hugging Face format that this strategy can train"
        yield Finding("model", error.message, Verdict.FAIL, fix)
        yield Finding("data", "not read without the model's tokenizer", Verdict.WARN, "see above")
        return
    yield Finding("model", config.model)
    try:
        findings = _rows(config, given) if isinstance(config, SftConfig) else _prompts(config, given, prompts)
    except LockstepError as error:
        yield Finding("data", error.message, Verdict.FAIL, _fix(error))
        return
    yield from findings


def _fix(error: LockstepError) -> str:
    field = error.metadata.get("field", "")
    if field == "model":
        return "set model to a directory that has the files of its tokenizer, tokenizer.json among them"
    return f"correct {field if field.startswith('data.') else 'data'}, or the rows of its files"


def _rows(config: SftConfig, given: Addresses) -> list[Finding]:
    data = sft.load_data(config, given)
    assert data is not None, "the model is on this host"
    num_steps = config.num_steps or data.train.num_steps(config.num_epochs or 0)
    rows = num_steps * config.data.samples_per_step
    return [
        Finding("data", f"{counted(len(data.train), 'row')}{_held_out(data.held_out)}"),
        Finding("steps", _steps(num_steps, rows, len(data.train), "row")),
    ]


def _prompts(config: Config, given: Addresses, prompts: list[Prompt] | None) -> list[Finding]:
    data = rl.load_data(config, given)
    assert data is not None, "the model is on this host"
    first, num_prompts = data.train.prompts[0], config.num_steps * config.data.prompts_per_step
    if prompts is not None:
        prompts.append(first)
    answer = f"; answer: {shown(first.answer)}" if first.answer is not None else ""
    sent = data.tokenizer.decode(first.tokens, skip_special_tokens=False)
    return [
        Finding("data", f"{counted(len(data.train), 'prompt')}{_held_out(data.eval)}"),
        Finding("first prompt", f"{counted(len(first.tokens), 'token')}: {shown(sent)}{answer}"),
        Finding("steps", _steps(config.num_steps, num_prompts, len(data.train), "prompt")),
    ]


def _held_out(sets: Mapping[str, Sized]) -> str:
    return "".join(f", {len(rows)} held out in {name}" for name, rows in sets.items())


def _steps(num_steps: int, num_read: int, num_rows: int, noun: str) -> str:
    verb = "reads" if num_steps == 1 else "read"
    read = f"{counted(num_steps, 'step')} {verb} {counted(num_read, noun)}"
    return f"{read}, {num_read / num_rows:.3g} epochs, if every one is used"


def shown(text: str) -> str:
    """Returns the beginning of a text as a Python literal, in which every character is printable."""
    return repr(text) if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]!r}..."
