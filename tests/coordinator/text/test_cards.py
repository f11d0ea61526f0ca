"""Tests that an exported model's tokenizer, as transformers reads it, renders and stops as the run did."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lockstep.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from lockstep.types.v1.types_pb2 import ModelCard
from transformers import AutoTokenizer, GenerationConfig

from services.common.config.data import FilesConfig
from services.common.model_card import card_texts, read_model_card, write_model_card
from services.common.rpc.server import Server
from services.coordinator.clients.trainer import Trainer
from services.coordinator.text.cards import served_files
from services.coordinator.text.tokenizer import Tokenizer
from services.trainer.checkpoint.model_files import export_hugging_face, served_card, tokenizer_card
from tests.coordinator.conftest import CHATML
from tests.coordinator.fake_services import make_config

CHAT = [{"role": "user", "content": "Zoë: 2 + 2?"}, {"role": "assistant", "content": "4"}]
SHOWN = "\n {{ style }}{{ none_given }}{{ more if more is defined }}"
OTHER = SHOWN + CHATML


def exported(model: Path, directory: Path, data: FilesConfig) -> tuple[Path, Path]:
    """Returns the directories of an exported model and of its adapter."""
    served = served_files(read_model_card(model), data)
    card = served_card(read_model_card(model), card_texts(served))
    adapter = directory / "adapter"
    adapter.mkdir(parents=True)
    export_hugging_face({"a": torch.ones(2)}.items(), card, directory)
    write_model_card(tokenizer_card(card), adapter)
    return directory, adapter


@pytest.mark.parametrize("own", ["jinja", "key", "list", "disagree"])
@pytest.mark.parametrize(
    "variables",
    [{}, {"enable_thinking": False}, {"style": 'a "%} b', "none_given": None, "more": {"x": [1, True, None, "é"]}}],
)
@pytest.mark.parametrize("is_given", [True, False])
def test_an_export_renders_the_training_prompt(
    make_model: Callable[..., Path], tmp_path: Path, own: str, variables: dict[str, Any], is_given: bool
) -> None:
    key: Any = {"jinja": None, "key": OTHER, "disagree": "{{ 'stale' }}"}.get(own, [
        {"name": "default", "template": OTHER}, {"name": "tool_use", "template": "{{ 'tools' }}"}
    ])  # fmt: skip
    more = {} if key is None else {"chat_template": key}
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", **more}
    model = make_model(OTHER if own in ("jinja", "disagree") else None, tokenizer_config=config)
    own_template = tmp_path / "own.jinja"
    own_template.write_text(OTHER.replace("helpful", "terse"), encoding="utf-8-sig")
    data = FilesConfig(
        train=(tmp_path,), chat_template=own_template if is_given else None, chat_template_kwargs=variables
    )
    trained = Tokenizer.load(model, chat_template=data.chat_template)
    assert trained.render(CHAT, **variables).startswith("\n ")  # without the mark that begins a file of some editors
    before = read_model_card(model)
    for directory in exported(model, tmp_path / "out", data):
        served = AutoTokenizer.from_pretrained(directory)
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            text = served.apply_chat_template(CHAT, tools, tokenize=False, add_generation_prompt=True)
            assert text == trained.render(CHAT, **variables)
            tokens = served.apply_chat_template(CHAT, tools, add_generation_prompt=True, return_dict=False)
            assert tokens == trained.encode(text)
        assert served.apply_chat_template(CHAT, tokenize=False, style="S") == trained.render(
            CHAT, add_generation_prompt=False, **{**variables, "style": "S"}
        )
        again = Tokenizer.load(directory)
        assert again.render(CHAT) == again.render(CHAT, **variables) == text
        template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        assert (
            json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"] == template
        )
    assert read_model_card(model) == before


@pytest.mark.parametrize(
    ("files", "written"),
    [
        ({}, {"eos_token_id": [2, 0]}),
        ({"generation_config": {"eos_token_id": 0, "top_p": 0.8}}, {"eos_token_id": [0, 2], "top_p": 0.8}),
        ({"generation_config": None}, None),
        (
            {"generation_config": None, "config": {"model_type": "qwen2", "eos_token_id": 0, "pad_token_id": 1}},
            {"eos_token_id": [0, 2], "pad_token_id": 1},
        ),
    ],
)
def test_an_export_stops_at_every_token_that_ended_a_sample(
    make_model: Callable[..., Path], tmp_path: Path, files: dict[str, Any], written: dict[str, Any] | None
) -> None:
    model = make_model(**files)
    directory, adapter = exported(model, tmp_path / "out", FilesConfig(train=(tmp_path,)))
    path = directory / "generation_config.json"
    assert (json.loads(path.read_text()) if path.exists() else None) == written
    if written:
        stops = GenerationConfig.from_pretrained(directory).eos_token_id
        assert isinstance(stops, list)
        assert tuple(sorted(stops)) == Tokenizer.load(model).eos_token_ids
    assert not (adapter / "config.json").exists() and not (adapter / "generation_config.json").exists()


def test_a_model_without_a_template_or_a_tokenizer_is_exported_as_it_is(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    data = FilesConfig(train=(tmp_path,))
    assert not served_files(read_model_card(make_model(None)), data).files
    model = make_model(None, tokenizer=None)
    (model / "tokenizer.json").unlink()
    assert not served_files(read_model_card(model), data).files


class _Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Keeps what the coordinator asks to export."""

    def __init__(self, card: ModelCard):
        self.card, self.request = card, trainer_pb2.ExportHuggingFaceRequest()

    async def GetInfo(self, request: object, context: object) -> trainer_pb2.GetInfoResponse:
        return trainer_pb2.GetInfoResponse(num_ranks=1)

    async def OpenRun(self, request: object, context: object) -> trainer_pb2.OpenRunResponse:
        return trainer_pb2.OpenRunResponse(model_card=self.card)

    async def ExportHuggingFace(
        self, request: trainer_pb2.ExportHuggingFaceRequest, context: object
    ) -> trainer_pb2.ExportHuggingFaceResponse:
        self.request = request
        return trainer_pb2.ExportHuggingFaceResponse(num_bytes=1)


async def test_a_run_exports_the_template_that_it_opened_with(make_model: Callable[..., Path], tmp_path: Path) -> None:
    own_template = tmp_path / "own.jinja"
    own_template.write_text(OTHER)
    config = make_config(data={"train": "x.parquet", "prompts_per_step": 8, "chat_template": own_template})
    service, server = _Trainer(read_model_card(make_model())), Server()
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(service, server.grpc)
    port = await server.start("127.0.0.1:0", ["lockstep.trainer.v1.TrainerService"])
    trainer = Trainer(f"127.0.0.1:{port}", config)
    try:
        await trainer.open("run")
        own_template.unlink()
        await trainer.export("model")
    finally:
        await trainer.close()
        await server.grpc.stop(0)
    assert service.request.model_card.files["chat_template.jinja"].decode() == OTHER
