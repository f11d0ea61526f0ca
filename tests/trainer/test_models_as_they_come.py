"""Tests model directories as people have them: each is refused with its cause, or computed as transformers computes it.

A row of the table has what is special or wrong in a tiny model, and what each strategy says. It is tested in the order
of a run: the trainer's service reads the card, a rank opens the model, and rollout service and coordinator get the
card. All of it happens in this process; test_model_directories.py shows that a trainer of two ranks survives what is
refused.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.common.errors import InvalidInput, LockstepError, NotFound, Reason
from services.common.families.supported import ASK_FSDP
from services.common.model_card import read_model_card, write_model_card
from services.coordinator.text.tokenizer import Tokenizer
from tests.trainer import plain_grpo
from tests.trainer.damage import (
    CONFIG,
    INDEX,
    SHARD,
    WEIGHTS,
    Change,
    Tensors,
    all_of,
    contains,
    copied,
    has_json,
    has_tensors,
    indexed,
    is_a,
    is_other,
    lacks,
    link_outside,
    overlapping,
    truncated,
)
from tests.trainer.fsdp_harness import TEMPERATURE, Harness, samples
from tests.trainer.harness_processes import marked

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
DOWN, SINKS = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.sinks"
ANY, KNOWN = "not supported by any strategy", "strategy megatron knows llama, "
NOT_MEGATRON = f"not supported by strategy megatron{ASK_FSDP}"


@dataclass(frozen=True)
class Row:
    """Describes a change of a model, and what each strategy makes of it.

    `fsdp` and `megatron` are words of a refusal. Without them, the strategy computes what transformers computes.
    """

    change: Change
    fsdp: str = ""
    megatron: str = ""
    model: str = "untied"
    error: type[LockstepError] = InvalidInput
    fields: tuple[str, str] = ("model", "model")


def refused(change: Change, problem: str, **more: Any) -> Row:
    return Row(change, problem, problem, **more)


def without_prefix(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def transposed(tensors: Tensors) -> None:
    tensors |= {name: tensors[name].T.contiguous() for name in tensors if "down_proj" in name}


def halved(tensors: Tensors) -> None:
    tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}


def with_output_layer(by: float) -> Change:
    """Adds an output layer that is the embedding, but for one number, which differs by `by`."""

    def change(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += by

    return has_tensors(change)


def sets(name: str, tensor: torch.Tensor) -> Change:
    return has_tensors(lambda tensors: tensors.update({name: tensor}))


def drops(name: str) -> Change:
    return has_tensors(lambda tensors: tensors.pop(name))


TENSORS = {
    "one is missing": refused(drops(DOWN), f"has no tensor {DOWN}"),
    "a norm is missing": refused(drops(NORM), f"has no tensor {NORM}"),
    "the output layer is missing": refused(drops(HEAD), f"has no tensor {HEAD}"),
    "one is unknown": refused(sets(SINKS, torch.zeros(4)), f"{SINKS} in its checkpoint is not supported"),
    "config.json has more layers": refused(has_json(num_hidden_layers=3, layer_types=None), "no tensor model.layers.2"),
    "config.json has fewer layers": refused(has_json(num_hidden_layers=1, layer_types=None), "model.layers.1"),
    "config.json has more tokens": refused(has_json(vocab_size=80), f"{EMBEDDING} has shape [64, 64], but config.json"),
    "names without prefix": refused(has_tensors(without_prefix), f"has no tensor {EMBEDDING}"),
    "one has another shape": refused(sets(NORM, torch.zeros(63)), f"{NORM} has shape [63], but config.json gives [64]"),
    "some are transposed": refused(has_tensors(transposed), "down_proj.weight has shape [128, 64]"),
    "one is of integers": refused(sets(NORM, torch.ones(64, dtype=torch.int8)), f"{NORM} has dtype I8"),
    "one has a NaN": refused(sets(NORM, torch.full((64,), torch.nan)), f"{NORM} has numbers that are not finite"),
    "one has an infinity": refused(sets(NORM, torch.arange(64.0).log()), f"{NORM} has numbers that are not finite"),
    "tied and stored twice": Row(with_output_layer(0), model="tied"),
    "tied and different": refused(with_output_layer(1), f"config.json ties {HEAD} to {EMBEDDING} (tie_", model="tied"),
    "tied, under the other name": Row(
        has_tensors(lambda t: t.update({HEAD: t.pop(EMBEDDING)})), megatron=f"has no tensor {EMBEDDING}", model="tied"
    ),
    "no format is given": Row(has_tensors(len, made="by hand")),
    "bfloat16": Row(has_tensors(halved)),
    "an old buffer": Row(sets("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16))),
}
# For some of these, transformers would load other weights than those that were checked.
FILES = {
    "an index": Row(indexed()),
    "an index of the whole file": Row(indexed(WEIGHTS)),
    "a whole file beside an index": refused(
        all_of(indexed(), copied(WEIGHTS, SHARD)), f"has both {WEIGHTS} and {INDEX}"
    ),
    "a tensor in two files": refused(
        all_of(indexed(model__norm__weight="shard-2.safetensors"), copied("shard-2.safetensors", SHARD)),
        "is in two files",
    ),
    "another name in config.json": refused(
        all_of(copied("other.safetensors"), has_json(transformers_weights="other.safetensors")), "transformers_weights"
    ),
    "an adapter beside the weights": refused(
        contains("adapter_config.json", b'{"base_model_name_or_path": "elsewhere"}'), "has adapter_config.json: merge"
    ),
    "missing": refused(lacks(WEIGHTS), f"has no {WEIGHTS}"),
    "pickled": refused(all_of(lacks(WEIGHTS), contains("pytorch_model.bin", b"x")), f"has no {WEIGHTS}"),
    "empty": refused(contains(WEIGHTS, b""), WEIGHTS),
    "garbage": refused(contains(WEIGHTS, b"garbage" * 1000), WEIGHTS),
    "huge header": refused(contains(WEIGHTS, (2**62).to_bytes(8, "little") + b"{}"), WEIGHTS),
    "header is not JSON": refused(contains(WEIGHTS, (16).to_bytes(8, "little") + b"not a header at "), WEIGHTS),
    "truncated": refused(truncated, f"{WEIGHTS} is not a whole safetensors file"),
    "overlapping": Row(overlapping, fsdp="cannot be loaded", megatron=f"{WEIGHTS} is not a whole safetensors file"),
    "directory": refused(is_other(WEIGHTS, Path.mkdir), f"{WEIGHTS} is not a regular file"),
    "fifo": refused(is_other(WEIGHTS, os.mkfifo), f"{WEIGHTS} is not a regular file"),
    "link to nothing": refused(is_other(WEIGHTS, lambda path: path.symlink_to("nothing")), f"{WEIGHTS} is not a"),
    "index is not JSON": refused(all_of(indexed(), contains(INDEX, b"{")), INDEX),
    "index has no map": refused(all_of(indexed(), contains(INDEX, b"{}")), INDEX),
    "index of numbers": refused(indexed(model__norm__weight=3), INDEX),
    "index is a fifo": refused(is_other(INDEX, os.mkfifo), INDEX),
    "index names no file": refused(indexed(model__norm__weight="shard-2.safetensors"), "shard-2.safetensors"),
    "index names no tensor": refused(indexed(model__absent=SHARD), "model.absent"),
    "index leaves the directory": refused(indexed(model__norm__weight="/etc/passwd"), "/etc/passwd"),
    "index goes up": refused(indexed(model__norm__weight=f"../{SHARD}"), f"../{SHARD}"),
    "index has a long name": refused(indexed(model__norm__weight="x" * 300), "xxx"),
    "index names a fifo": refused(
        all_of(indexed(model__norm__weight="pipe"), lambda model: os.mkfifo(model / "pipe")),
        "pipe is not a regular file",
    ),
}
CARD = {
    "config empty": refused(contains(CONFIG, b""), CONFIG),
    "config not JSON": refused(contains(CONFIG, b"model_type: qwen3"), CONFIG),
    "config list": refused(contains(CONFIG, b"[]"), CONFIG),
    "config deep": refused(contains(CONFIG, b"[" * 100_000), CONFIG),
    "config directory": refused(is_other(CONFIG, Path.mkdir), CONFIG),
    "config fifo": refused(is_other(CONFIG, os.mkfifo), CONFIG),
    "config link to nothing": refused(is_other(CONFIG, lambda path: path.symlink_to("nothing")), CONFIG),
    "config link outside": refused(is_other(CONFIG, link_outside), CONFIG),
    "config code": refused(has_json(auto_map={"AutoConfig": "evil.Config"}), "auto_map"),
    "config missing": refused(lacks(CONFIG), CONFIG, error=NotFound),
    "config without type": refused(contains(CONFIG, b"{}"), CONFIG),
    "config of unknown type": refused(has_json(model_type="qwen99"), CONFIG),
    "config with text for a size": refused(has_json(hidden_size="sixty-four"), CONFIG),
    "config without heads": refused(has_json(num_attention_heads=0), CONFIG),
    "config with a negative size": refused(has_json(intermediate_size=-8), CONFIG),
    "config with an odd size of heads": refused(has_json(head_dim=3), "has shape [128, 64], but config"),
    "config with a size beyond all memory": refused(has_json(intermediate_size=10**7), "config.json gives [10000000"),
    "config with layers beyond all memory": refused(
        has_json(num_hidden_layers=10**9), "num_hidden_layers 1000000000 is not a number"
    ),
    "config quantized": refused(has_json(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "generation not JSON": refused(contains("generation_config.json", b"{"), "generation_config.json"),
    "generation link outside": refused(is_other("generation_config.json", link_outside), "generation_config.json"),
    "generation fifo": refused(is_other("generation_config.json", os.mkfifo), "generation_config.json"),
    "tokenizer missing": refused(lacks("tokenizer.json"), "tokenizer.json", error=NotFound),
    "tokenizer not JSON": refused(contains("tokenizer.json", b"{"), "tokenizer.json"),
    "tokenizer of nothing": refused(contains("tokenizer.json", b"{}"), "tokenizer.json"),
    "tokenizer settings list": refused(contains("tokenizer_config.json", b"[]"), "tokenizer_config.json"),
    "special tokens not JSON": refused(contains("special_tokens_map.json", b"{"), "special_tokens_map.json"),
    "template not Jinja": refused(
        contains("chat_template.jinja", b"{% if %}"), "chat_template.jinja", fields=("data.chat_template",) * 2
    ),
    "template not text": refused(contains("chat_template.jinja", b"\xff\xfe"), "chat_template.jinja"),
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
ALPHA = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}


def rope(**settings: Any) -> Change:
    return is_a("llama", rope_parameters=settings)


FUNCTION = {
    "dropout in layers": Row(
        is_a("seed_oss", head_dim=16, residual_dropout=0.4, attention_dropout=0.4), megatron=KNOWN
    ),
    "dropout of embeddings": Row(
        is_a("starcoder2", residual_dropout=0.4, embedding_dropout=0.4, sliding_window=None), megatron=KNOWN
    ),
    "dropout in attention": Row(is_a("llama", attention_dropout=0.4)),
    "dropout that Megatron has not": Row(is_a("phi3", resid_pdrop=0.1), megatron="resid_pdrop 0.1"),
    "noise in routers": Row(is_a("mixtral", **EXPERTS, router_jitter_noise=0.5)),
    "noise before routers": Row(
        is_a("phimoe", **EXPERTS, router_jitter_noise=0.5, input_jitter_noise=0.5), megatron=KNOWN
    ),
    "the pad token is in the text": Row(has_json(pad_token_id=samples()["prompt_tokens"][0].as_py()[0])),
    "the pad token is the end token": Row(has_json(pad_token_id=1)),
    "partial rotation": Row(is_a("phi3", rope_parameters=PARTIAL)),
    "partial rotation that transformers ignores": refused(rope(**PARTIAL), f"partial_rotary_factor 0.75 is {ANY}"),
    "dynamic scaling": refused(rope(rope_type="dynamic", factor=2.0, rope_theta=1e4), f"'dynamic' is {ANY}"),
    "dynamic scaling of Hunyuan's": Row(is_a("hunyuan_v1_dense", head_dim=16, rope_parameters=ALPHA), megatron=KNOWN),
    "long scaling": refused(has_json(model_type="phi3", rope_parameters=LONG), f"'longrope' is {ANY}"),
    "linear scaling": Row(rope(rope_type="linear", factor=2.0, rope_theta=1e4)),
    "scaling under its old name": Row(
        has_json(rope_parameters=None, rope_theta=5e4, rope_scaling={"type": "linear", "factor": 2.0})
    ),
    "Llama 3's scaling": Row(rope(**LLAMA3, original_max_position_embeddings=8192)),
    "Llama 3's scaling of other lengths": Row(
        rope(**LLAMA3, original_max_position_embeddings=4096), megatron="rotary scaling"
    ),
    "Llama 3's scaling of other factors": Row(
        rope(**LLAMA3 | {"low_freq_factor": 2.0}, original_max_position_embeddings=8192), megatron="rotary scaling"
    ),
    "yarn": Row(rope(**YARN), megatron="rotary scaling"),
    "a window": Row(is_a("mistral", sliding_window=8), megatron=f"sliding_window 8 is {NOT_MEGATRON}"),
    "a window that is left out": Row(
        is_a("mistral", sliding_window=..., use_sliding_window=...), megatron=f"sliding_window 4096 is {NOT_MEGATRON}"
    ),
    "a window with a flag that transformers does not read": Row(
        is_a("mistral", sliding_window=8, use_sliding_window=False), megatron=f"sliding_window 8 is {NOT_MEGATRON}"
    ),
    "a window in some layers": Row(
        has_json(sliding_window=8, use_sliding_window=True, max_window_layers=1, layer_types=None),
        megatron=f"8 is {NOT_MEGATRON}",
    ),
    "a window of Phi's": Row(is_a("phi3", sliding_window=7), megatron=f"sliding_window 7 is {NOT_MEGATRON}"),
    "a window that is off": Row(is_a("qwen2", sliding_window=4096, use_sliding_window=False)),
    "biases in attention": Row(is_a("llama", attention_bias=True), megatron="attention_bias True"),
    "biases in layers": Row(is_a("llama", mlp_bias=True), megatron="mlp_bias True"),
    "another activation": Row(is_a("llama", hidden_act="gelu"), megatron="hidden_act 'gelu'"),
    "capped logits": Row(
        has_json(final_logit_softcapping=0.5),
        fsdp="final_logit_softcapping in its config.json is ignored by transformers",
    ),
    "scaled logits": Row(has_json(logit_scale=0.5), fsdp="logit_scale in its config.json is ignored by transformers"),
    "a bias of the output layer": Row(is_a("phi"), fsdp="lm_head.bias", megatron=KNOWN),
    "convolutions": Row(is_a("lfm2", layer_types=["conv", "full_attention"]), megatron=KNOWN),
    "experts of a width that torch cannot compute": Row(
        is_a("mixtral", **EXPERTS, intermediate_size=90),
        fsdp="experts.down_proj of shape [4, 64, 90] (moe_intermediate_size, hidden_size): the last size must be a "
        "multiple of 4 in torch.float32",
        megatron="trainer.megatron.moe.grouped_gemm: experts of 64 x 90 on each rank do not have rows of a multiple of "
        "16 bytes; set it to false",
        fields=("model", "trainer.megatron.moe.grouped_gemm"),
    ),
    "convolutions, by the index of other layers": Row(
        is_a("lfm2", layer_types=None, full_attn_idxs=[1]), megatron=KNOWN
    ),
    **{
        f"structure of {kind}": Row(is_a(kind, num_key_value_heads=heads, **more), megatron=KNOWN)
        for kind, heads, more in (
            ("stablelm", 4, {}),
            ("nemotron", 2, {}),
            ("gpt2", ..., {}),
            ("gpt_neox", ..., {}),
            ("bloom", ..., {"intermediate_size": ...}),
            ("xglm", ..., {"intermediate_size": ...}),
        )
    },
}
ROWS = {
    f"{table}: {name}": row
    for table, rows in (("tensors", TENSORS), ("files", FILES), ("card", CARD), ("function", FUNCTION))
    for name, row in rows.items()
}


# Only make test-long runs these: other rows of what is computed see the same in another family or with other numbers.
LONG = {
    *("tensors: no format is given", "files: an index of the whole file", "function: structure of stablelm"),
    *("function: structure of nemotron", "function: structure of gpt2", "function: structure of xglm"),
    *("function: dropout of embeddings", "function: a window", "function: another activation"),
    *("function: convolutions, by the index of other layers", "function: the pad token is the end token"),
    *("function: Llama 3's scaling of other factors", "function: dropout that Megatron has not"),
}
assert ROWS.keys() >= LONG


def opened(harness: Harness, model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Opens the model as a run does."""
    card = read_model_card(model)
    harness.open(str(model), settings)
    copy = Path(tempfile.mkdtemp(dir=tmp_path))
    write_model_card(card, copy)
    Tokenizer.load(copy)


@pytest.mark.parametrize("name", marked(ROWS, LONG))
def test_a_model(harness: Harness, trainer_files: Path, tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    model = Path(shutil.copytree(trainer_files / "models" / row.model, tmp_path / "model"))
    row.change(model)
    # Something else to compare a gradient with, where Megatron has none.
    again = [("fsdp", "", True)] if row.megatron and not row.fsdp else []
    metrics = []
    for strategy, problem, is_recomputed in (("fsdp", row.fsdp, False), ("megatron", row.megatron, False), *again):
        settings = {"strategy": strategy, "gradient_checkpointing": is_recomputed}
        if not problem:
            opened(harness, model, tmp_path, settings)
            np.testing.assert_allclose(np.concatenate(harness.logprobs(samples())), want(model), rtol=0, atol=1e-5)
            metrics.append(harness.train(samples()))
            continue
        with pytest.raises(LockstepError) as caught:
            opened(harness, model, tmp_path, settings)
        assert problem in caught.value.message, caught.value.message
        assert (type(caught.value), caught.value.metadata.get("field")) == (
            row.error,
            row.fields[strategy == "megatron"],
        )
        assert row.error is NotFound or caught.value.reason == Reason.INVALID_INPUT
    # In training, too, nothing is random and nothing is left out: all see the same loss and the same gradient.
    for other in metrics[1:]:
        assert other == pytest.approx(metrics[0], rel=1e-5, abs=1e-5)


def want(model_path: Path) -> np.ndarray:
    """Returns the log-probabilities that transformers computes for inference."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.concatenate([plain_grpo.score(model, row, TEMPERATURE)[0] for row in samples().to_pylist()])
