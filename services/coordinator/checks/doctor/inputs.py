"""Checks the model and data of a config with the same early checks that a run makes."""

from collections.abc import Iterator
from pathlib import Path

from services.common.config.any import AnyConfig
from services.common.config.sft import SftConfig
from services.common.errors import LockstepError
from services.common.model_card import read_model_card
from services.coordinator.checks.doctor.finding import Finding, Verdict
from services.coordinator.checks.plan import check_model
from services.coordinator.rl import session as rl
from services.coordinator.services.launch import Addresses
from services.coordinator.sft import session as sft


def examine_inputs(config: AnyConfig, given: Addresses) -> Iterator[Finding]:
    """Checks that the run would accept its model and data, if they are on this host."""
    if given.trainer and not Path(config.model).is_dir():
        yield Finding("model", f"{config.model} is not on this host; model and data were not checked")
        return
    try:
        read_model_card(config.model)
        check_model(config)
    except LockstepError as error:
        fix = "set model to a directory in the Hugging Face format that this strategy can train"
        yield Finding("model", error.message, Verdict.FAIL, fix)
        yield Finding("data", "not read without the model's tokenizer", Verdict.WARN, "see above")
        return
    yield Finding("model", config.model)
    try:
        found = _rows(config, given)
    except LockstepError as error:
        yield Finding("data", error.message, Verdict.FAIL, "set data to files and columns that exist")
        return
    yield Finding("data", found)


def _rows(config: AnyConfig, given: Addresses) -> str:
    if isinstance(config, SftConfig):
        rows = sft.load_data(config, given)
        assert rows is not None, "the model is on this host"
        return f"{len(rows.train)} rows" + "".join(
            f", {len(held)} held out in {name}" for name, held in rows.held_out.items()
        )
    data = rl.load_data(config, given)
    assert data is not None, "the model is on this host"
    held_out = "".join(f", {len(prompts)} held out in {name}" for name, prompts in data.eval.items())
    return f"{len(data.train)} prompts{held_out}"
