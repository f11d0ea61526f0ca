"""A session that must not go on ends before it starts a service."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.config.run import Config
from services.common.errors import InvalidInput, PreconditionFailed
from services.coordinator.data.prompts import PromptDataset, load_eval
from services.coordinator.fleet.launch import Addresses
from services.coordinator.rl import session
from services.coordinator.rl.session import Dataset, run_session
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.fake_services import make_config
from tests.support import raises


class Viewer:
    """Shows nothing."""

    console = None

    def start(self) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def begin(self, run: Any, version: int) -> Any:
        raise AssertionError("the loop began")


def load(config: Config, tokenizer: Tokenizer) -> Dataset:
    data = PromptDataset.load(config.data, tokenizer, seed=0)
    return Dataset(tokenizer, [], data, load_eval(config.data, tokenizer))


@pytest.mark.parametrize("what", ["data.train", "data.eval.x", "the chat template"])
async def test_changed_data_is_refused_before_anything_starts(
    tmp_path: Path,
    make_model: Callable[..., Path],
    write_parquet: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    files = {name: write_parquet(f"{name}.parquet", prompt=["a"], answer=["1"]) for name in ("train", "x")}
    sections = {"data": {"train": files["train"], "eval": {"x": files["x"]}, "prompts_per_step": 1}, "reward": {}}
    sections |= {"environment": {"kind": "python", "path": "a:B"}}
    config = make_config(model=str(make_model()), runs_dir=tmp_path / "runs", **sections)
    started: list[Any] = []

    def start(*args: Any, **keys: Any) -> Any:
        started.append(args)
        raise RuntimeError("services start here")

    monkeypatch.setattr(session.Sessions, "running_services", start)
    before = load(config, Tokenizer.load(make_model()))
    with pytest.raises(RuntimeError, match="services start here"):
        await run_session(config, Addresses(), Viewer(), before)
    ledger = Ledger(config.run_dir / "ledger.sqlite")
    ledger.record(Kind.DATA, digests={"data.train": before.train.digest, **before.other_digests(config)})
    ledger.record(Kind.EVALUATED, 0, **{"eval/x/reward/mean": 0.5})
    ledger.record(Kind.COLLECTED, 0, dataset=before.train.digest, digest="d", sha256="s")
    ledger.close()
    if what != "the chat template":
        name = "train" if what == "data.train" else "x"
        write_parquet(f"{name}.parquet", prompt=["a"], answer=["2"])
        now = load(config, before.tokenizer)
    else:
        now = replace(before, tokenizer=Tokenizer.load(make_model("{{ messages }}")))
    with pytest.raises(PreconditionFailed, match=f"^{what} differs from what .* was started with"):
        await run_session(config, Addresses(), Viewer(), now)
    assert len(started) == 1


def test_a_chat_template_that_renders_nothing_is_refused(
    tmp_path: Path, make_model: Callable[..., Path], write_parquet: Callable[..., Path]
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    data = {"train": write_parquet(prompt=["a"], answer=["1"]), "prompts_per_step": 1, "chat_template": template}
    config = make_config(model=str(make_model()), runs_dir=tmp_path, data=data)
    with raises(InvalidInput, field="data.chat_template"):
        session.load_data(config, Addresses())
    for used in ({"data": {**data, "chat": True}}, {"data": data, "environment": {"kind": "python", "path": "a:B"}}):
        assert session.load_data(make_config(model=str(make_model()), runs_dir=tmp_path, **used), Addresses())
