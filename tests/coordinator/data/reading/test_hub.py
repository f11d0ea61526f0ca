"""Models on the Hub: a config that names one is loaded from this host's cache; one clear line says if it cannot be."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError

from services.common.config.run import Config
from services.common.errors import LockstepError, NotFound, Unavailable
from services.coordinator.data.reading.hub import hub_errors, with_local_models
from tests.coordinator.data.fake_hub import asking, hub
from tests.support import ROOT

MODEL = ROOT / "deploy" / "quickstart" / "model"
OTHERS = {"pytorch_model.bin": b"the same weights", "README.md": b"words"}
PROGRAM = """
import json
from pathlib import Path
from services.common.config.load import load
from services.common.config.run import Config
from services.common.errors import LockstepError
from services.coordinator.data.reading.hub import with_local_models
from services.coordinator.text.tokenizer import Tokenizer
from services.common.model_card import read_model_card
from services.coordinator.cli.init import starting_config
def answer(has_weights, *arguments):
    try:
        written = load(Config, arguments)
        config = with_local_models(written, has_weights=has_weights)
        Tokenizer.load(Path(config.model))
        if not has_weights:
            made = starting_config(Path(written.model), Path("rows.jsonl"), Path("run.yaml"), num_gpus=0)
            assert f'model: "{written.model}" ' in made, made
        return json.dumps([config.model, config.reference.model, sorted(read_model_card(config.model).files)])
    except LockstepError as error:
        return f"{type(error).__name__} {error}"
"""


@pytest.fixture(autouse=True)
def rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')


def resolve(ask: Callable[..., str], model: str, *more: str, has_weights: bool = True) -> str:
    config = [f"model={model}", "data.train=none.parquet", "data.prompts_per_step=1", "reward.scorers=[{kind: exact}]"]
    return ask(has_weights, *config, *more)


def names(answer: str) -> set[str]:
    return {path.name for path in Path(json.loads(answer)[0]).iterdir()}


def test_a_model_on_the_hub_is_a_directory_of_the_cache(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()}
    with hub(files | OTHERS) as endpoint, asking(PROGRAM, endpoint, tmp_path) as ask:
        card = resolve(ask, "openai/gsm8k", has_weights=False)
        assert names(card) == files.keys() - {"model.safetensors", "SHA256SUMS"}
        whole = resolve(ask, "openai/gsm8k", "reference.model=openai/gsm8k@v1")
        assert names(whole) == names(card) | {"model.safetensors"}
        directory, reference, files = json.loads(whole)
        assert directory == reference and "tokenizer.json" in files
        missing = resolve(ask, "openai/gsm9k")
        assert missing.startswith("NotFound model: you cannot see openai/gsm9k, which is not a directory here, on the")
    with asking(PROGRAM, endpoint, tmp_path) as ask:
        assert resolve(ask, "openai/gsm8k") == resolve(ask, directory)  # it was kept
        elsewhere = resolve(ask, "openai/gsm9k")
    assert elsewhere.startswith("Unavailable model: openai/gsm9k, which is not a directory here, was not downloaded")
    assert elsewhere.endswith("use a local copy") and "\n" not in elsewhere


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (503, Unavailable, "dataset a/b cannot be read"),
        (429, Unavailable, "dataset a/b cannot be read"),
        (403, NotFound, "you cannot see dataset a/b"),
    ],
)
def test_a_hub_that_is_down_says_nothing_of_what_it_has(status: int, kind: type[LockstepError], message: str) -> None:
    answer = httpx.Response(status, request=httpx.Request("GET", "http://hub"))
    with pytest.raises(kind, match=message), hub_errors("dataset a/b", None, "data.train"):
        raise HfHubHTTPError("the Hub's words", response=answer)


def test_a_path_stays_as_it_is(tmp_path: Path) -> None:
    rest = {"data": {"train": ("none.parquet",), "prompts_per_step": 1}, "reward": {"scorers": ({"kind": "exact"},)}}
    for path in (str(MODEL), str(tmp_path / "missing"), "./models/missing", "models"):
        assert with_local_models(Config.model_validate({"model": path, **rest})).model == path
