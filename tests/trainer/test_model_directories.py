"""Tests damaged model directories: a typed error names the file, and the trainer goes on.

One trainer of two ranks opens them all, and a good model after some.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from safetensors.torch import load_file, save_file

from services.common.config.trainer.roles import CriticSettings
from services.common.errors import InvalidInput, LockstepError, NotFound, Reason
from services.common.files.model_card import write_model_card
from services.coordinator.text.tokenizer import Tokenizer
from tests.trainer.deployment import Deployment
from tests.trainer.fsdp_harness import config

Break = Callable[[Path], Any]
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NORM = "model.norm.weight"


def contains(name: str, content: bytes) -> Break:
    return lambda model: (model / name).write_bytes(content)


def lacks(name: str) -> Break:
    return lambda model: (model / name).unlink()


def is_other(name: str, make: Callable[[Path], Any]) -> Break:
    def apply(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        make(model / name)

    return apply


def has_json(name: str, **changes: Any) -> Break:
    def apply(model: Path) -> None:
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | changes))

    return apply


def has_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    def apply(model: Path) -> None:
        tensors = load_file(model / WEIGHTS)
        change(tensors)
        save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})

    return apply


def truncated(model: Path) -> None:
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size // 2)


def indexed(**files: Any) -> Break:
    """An index that puts every tensor into `shard-1.safetensors`, except for `files`: tensor -> file."""

    def apply(model: Path) -> None:
        (model / WEIGHTS).rename(model / "shard-1.safetensors")
        names = load_file(model / "shard-1.safetensors")
        weight_map = dict.fromkeys(names, "shard-1.safetensors") | {
            key.replace("__", "."): f for key, f in files.items()
        }
        (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return apply


def both(*changes: Break) -> Break:
    return lambda model: [change(model) for change in changes]


def link_outside(path: Path) -> None:
    (path.parents[1] / "secret.json").write_text("{}")
    path.symlink_to("../secret.json")


HUGE_HEADER = (2**62).to_bytes(8, "little") + b"{}"
NO_HEADER = (16).to_bytes(8, "little") + b"not a header at "
# Name -> what is broken, and what the message names.
# Refused before any rank sees them, with every strategy.
CARDS: dict[str, tuple[Break, str]] = {
    "config-empty": (contains(CONFIG, b""), CONFIG),
    "config-not-json": (contains(CONFIG, b"model_type: qwen3"), CONFIG),
    "config-list": (contains(CONFIG, b"[]"), CONFIG),
    "config-deep": (contains(CONFIG, b"[" * 100_000), CONFIG),
    "config-directory": (is_other(CONFIG, Path.mkdir), CONFIG),
    "config-fifo": (is_other(CONFIG, os.mkfifo), CONFIG),
    "config-link-to-nothing": (is_other(CONFIG, lambda path: path.symlink_to("nothing")), CONFIG),
    "config-link-outside": (is_other(CONFIG, link_outside), CONFIG),
    "config-code": (has_json(CONFIG, auto_map={"AutoConfig": "evil.Config"}), CONFIG),
    "generation-not-json": (contains("generation_config.json", b"{"), "generation_config.json"),
    "generation-link-outside": (is_other("generation_config.json", link_outside), "generation_config.json"),
    "generation-fifo": (is_other("generation_config.json", os.mkfifo), "generation_config.json"),
}
VARIANTS: dict[str, tuple[Break, str]] = {
    "config-without-type": (contains(CONFIG, b"{}"), CONFIG),
    "config-unknown-type": (has_json(CONFIG, model_type="qwen99"), CONFIG),
    "config-text-for-size": (has_json(CONFIG, hidden_size="sixty-four"), CONFIG),
    "config-no-heads": (has_json(CONFIG, num_attention_heads=0), CONFIG),
    "config-negative-size": (has_json(CONFIG, intermediate_size=-8), CONFIG),
    "config-quantized": (has_json(CONFIG, quantization_config={"quant_method": "fp8"}), CONFIG),
    "config-other-vocabulary": (has_json(CONFIG, vocab_size=80), "model.embed_tokens.weight"),
    "config-more-layers": (has_json(CONFIG, num_hidden_layers=3, layer_types=None), "model.layers.2."),
    "weights-missing": (lacks(WEIGHTS), WEIGHTS),
    "weights-pickled": (both(lacks(WEIGHTS), contains("pytorch_model.bin", b"x")), WEIGHTS),
    "weights-empty": (contains(WEIGHTS, b""), WEIGHTS),
    "weights-garbage": (contains(WEIGHTS, b"garbage" * 1000), WEIGHTS),
    "weights-huge-header": (contains(WEIGHTS, HUGE_HEADER), WEIGHTS),
    "weights-header-not-json": (contains(WEIGHTS, NO_HEADER), WEIGHTS),
    "weights-truncated": (truncated, WEIGHTS),
    "weights-directory": (is_other(WEIGHTS, Path.mkdir), WEIGHTS),
    "weights-fifo": (is_other(WEIGHTS, os.mkfifo), WEIGHTS),
    "weights-link-to-nothing": (is_other(WEIGHTS, lambda path: path.symlink_to("nothing")), WEIGHTS),
    "tensors-integer": (has_tensors(lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.int8)})), NORM),
    "tensors-missing": (has_tensors(lambda tensors: tensors.pop(NORM)), NORM),
    "tensors-extra": (has_tensors(lambda tensors: tensors.update({"model.sinks": torch.zeros(4)})), "model.sinks"),
    "tensors-other-shape": (has_tensors(lambda tensors: tensors.update({NORM: torch.zeros(63)})), NORM),
    "tensors-transposed": (
        has_tensors(lambda t: t.update({key: t[key].T.contiguous() for key in t if "down_proj" in key})),
        "down_proj",
    ),
    "tensors-nan": (has_tensors(lambda tensors: tensors[NORM].fill_(float("nan"))), NORM),
    "tensors-infinite": (has_tensors(lambda tensors: tensors[NORM][3:4].fill_(float("inf"))), NORM),
    "index-not-json": (both(indexed(), contains(INDEX, b"{")), INDEX),
    "index-without-map": (both(indexed(), contains(INDEX, b"{}")), INDEX),
    "index-of-numbers": (indexed(model__norm__weight=3), INDEX),
    "index-fifo": (is_other(INDEX, os.mkfifo), INDEX),
    "index-names-missing-file": (indexed(model__norm__weight="shard-2.safetensors"), "shard-2.safetensors"),
    "index-names-missing-tensor": (indexed(model__absent="shard-1.safetensors"), "model.absent"),
    "index-absolute": (indexed(model__norm__weight="/etc/passwd"), "/etc/passwd"),
    "index-parent": (indexed(model__norm__weight="../shard-1.safetensors"), "../shard-1.safetensors"),
    "index-long-name": (indexed(model__norm__weight="x" * 300), "xxx"),
    "index-names-fifo": (
        both(indexed(model__norm__weight="pipe"), lambda model: os.mkfifo(model / "pipe")),
        "pipe is not a regular file",
    ),
}
# One of each stage of opening: after them a good model is opened.
THEN_A_GOOD_ONE = {
    *("config-deep", "config-unknown-type", "config-more-layers", "weights-truncated", "tensors-nan"),
    *("index-names-missing-tensor", "tokenizer-not-json", CONFIG),
}
# The trainer only passes these on; the coordinator reads them before any step.
TOKENIZERS: dict[str, tuple[Break, str]] = {
    "tokenizer-not-json": (contains("tokenizer.json", b"{"), "tokenizer.json"),
    "tokenizer-no-tokenizer": (contains("tokenizer.json", b"{}"), "tokenizer.json"),
    "tokenizer-settings-list": (contains("tokenizer_config.json", b"[]"), "tokenizer_config.json"),
    "tokenizer-special-not-json": (contains("special_tokens_map.json", b"{"), "special_tokens_map.json"),
    "template-not-jinja": (contains("chat_template.jinja", b"{% if %}"), "chat_template.jinja"),
    "template-not-text": (contains("chat_template.jinja", b"\xff\xfe"), "chat_template.jinja"),
}


@pytest.fixture
def broken(trainer_files: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trainer_files / "models" / "untied", tmp_path / "model"))


async def is_refused(deployment: Deployment, model: Path, variant: str, named: str, **changes: Any) -> LockstepError:
    """Opens the model, and its tokenizer as the coordinator would; after some, the trainer opens a good model."""
    with pytest.raises(LockstepError) as caught:
        opened = await deployment.open(str(model), **changes)
        card = model.parent / "card"
        card.mkdir()
        write_model_card(opened.model_card, card)
        Tokenizer.load(card)
    assert named in caught.value.message, caught.value.message
    if variant in THEN_A_GOOD_ONE:
        await deployment.open("untied", **changes)
    return caught.value


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
@pytest.mark.parametrize("variant", VARIANTS)
async def test_damaged_model(deployment: Deployment, broken: Path, variant: str, strategy: str) -> None:
    change, named = VARIANTS[variant]
    change(broken)
    error = await is_refused(deployment, broken, variant, named, strategy=strategy)
    assert (type(error), error.reason) == (InvalidInput, Reason.INVALID_INPUT)
    assert error.metadata["field"] == "model"
    info = (await deployment.call(TrainerService.GetInfo, pb.GetInfoRequest())).info
    assert info.state == ("open" if variant in THEN_A_GOOD_ONE else "idle")


@pytest.mark.parametrize("variant", CARDS | TOKENIZERS)
async def test_damaged_card(deployment: Deployment, broken: Path, variant: str) -> None:
    change, named = (CARDS | TOKENIZERS)[variant]
    change(broken)
    error = await is_refused(deployment, broken, variant, named)
    assert (type(error), error.reason) == (InvalidInput, Reason.INVALID_INPUT)


@pytest.mark.parametrize("name", [CONFIG, "tokenizer.json"])
async def test_missing_file(deployment: Deployment, broken: Path, name: str) -> None:
    lacks(name)(broken)
    assert isinstance(await is_refused(deployment, broken, name, name), NotFound)


async def test_missing_directory(deployment: Deployment, broken: Path) -> None:
    error = await is_refused(deployment, broken / "elsewhere", "", "elsewhere does not exist")
    assert (type(error), error.metadata["field"]) == (NotFound, "model")


async def test_a_sharded_model_is_opened(deployment: Deployment, broken: Path) -> None:
    """The index that `indexed` writes is none that is refused by itself."""
    indexed()(broken)
    for strategy in ("fsdp", "megatron"):
        assert (await deployment.open(str(broken), strategy=strategy)).num_ranks == 2


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
async def test_a_critic_needs_no_output_layer(deployment: Deployment, broken: Path, strategy: str) -> None:
    has_tensors(lambda tensors: tensors.update({"score.weight": tensors.pop("lm_head.weight")[:1]}))(broken)
    await deployment.open("untied", strategy=strategy)
    settings = CriticSettings.model_validate(config({"strategy": strategy}).model_dump())
    await deployment.open_role(pb.ROLE_CRITIC, settings, str(broken))
