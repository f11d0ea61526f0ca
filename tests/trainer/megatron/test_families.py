"""Tests every model family: weights go from Hugging Face to Megatron and back bit by bit, and the model is the same."""

import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.common.errors import InvalidInput
from services.common.families.architecture import read_architecture
from services.trainer.megatron.weights import require_loadable
from tests.support import VOCAB, raises, with_routed_experts
from tests.trainer import plain_grpo
from tests.trainer.fsdp_harness import TEMPERATURE, Harness, read, samples
from tests.trainer.harness_processes import marked, run_harness, to_run
from tests.trainer.megatron_layouts import FAMILIES, FAMILY_LAYOUTS, LOSS

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GLM = {
    "head_dim": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
}
TOKENS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Values are wider than keys. The eps of config.json is not that of the latents' norms, and large enough to be seen.
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-3,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | {"n_group": 4, "topk_group": 1},
    "deepseek_v3-yarn": LATENT
    | {
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 4.0},
    },
    "glm4_moe_lite": {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
    # The clamp and the windows are so small that they change results.
    "gpt_oss": {
        "head_dim": 32,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "swiglu_limit": 0.5,
        "rope_parameters": YARN | {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    # Only its layer without a window has a scaled rotary embedding.
    "olmo3": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "rope_parameters": {
            "full_attention": YARN | {"factor": 8.0, "attention_factor": 1.2079441541679836},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "llama-llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
    "mistral": {"sliding_window": None},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3-bf16": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, **EXPERTS, "norm_topk_prob": True},
    "qwen3_moe-bf16": {"head_dim": 32, **EXPERTS, "norm_topk_prob": True},
    "qwen3_moe-unnormalized": {"head_dim": 32, **EXPERTS, "norm_topk_prob": False},
    # The first of two pipeline stages has one layer, without experts.
    "qwen3_moe-mixed": {"head_dim": 32, **EXPERTS, "mlp_only_layers": [0], "num_hidden_layers": 3},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 80},
    "qwen2_moe-normalized": {
        **EXPERTS,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": True,
        "qkv_bias": False,
    },
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}, **TOKENS},
    "glm4_moe": GLM,
    "glm4_moe-bf16": GLM,
    "minimax_m2": {
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
HALF = ("qwen3-bf16", "qwen3_moe-bf16", "glm4_moe-bf16")
ROUTED = "deepseek_v3-routed"
SPLIT = [name for name, layout in FAMILY_LAYOUTS.items() if layout.world == 2 and name != ROUTED]
OF_FOUR = [name for name, layout in FAMILY_LAYOUTS.items() if layout.world == 4]
# Only make test-long runs these: other families have what they have, and other layouts of families that cut alike.
LONG_KINDS = {"llama", "llama-linear", "mistral", "qwen2", "qwen3_moe", "qwen3_moe-unnormalized", "olmo2"}
LONG_KINDS |= {"qwen2_moe-normalized", "qwen3-bf16", "qwen3_moe-bf16"}
SHORT_SPLIT = {"phi3-tp2", "deepseek_v3-yarn-tp2", "deepseek_v3-cp2", "qwen2_moe-tp2-ep2", "minimax_m2-tp2-ep2"}
SHORT_SPLIT |= {"olmo3-tp2", "gpt_oss-tp2", "glm4_moe-pp2", "qwen3_moe-mixed-pp2"}
LONG = {*LONG_KINDS, *OF_FOUR, *SPLIT} - SHORT_SPLIT
ALL = [*FAMILIES, *HALF, *SPLIT, *OF_FOUR]


def make_family(directory: Path, kind: str, **changes: Any) -> None:
    """Writes a random model, with random norms and biases too: one of only 1 or 0 would hide a mistake in its place."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind.partition("-")[0], **SHAPE | CHANGES.get(kind, {}) | changes)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter += 0.2 * torch.randn(parameter.shape)
    model.to(torch.bfloat16 if kind in HALF else torch.float32)
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:  # always float32, and here large enough to change many choices
            bias.data = 0.2 * torch.randn(bias.shape)
    model.save_pretrained(directory)


@pytest.fixture(scope="module")
def families(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides a directory with `models/<family>`, and in `results` what one, two and four ranks made of them."""
    directory = tmp_path_factory.mktemp("families")
    names = to_run(request, __file__, [*ALL, ROUTED], LONG)
    for kind in {FAMILY_LAYOUTS[name].kind for name in names}:
        make_family(directory / "models" / kind, kind)
    results = directory / "results"
    for world in (1, 2, 4):
        if mine := [name for name in names if FAMILY_LAYOUTS[name].world == world]:
            run_harness("megatron_harness", results, world, results, mine)
    return directory


@pytest.mark.parametrize("name", marked(ALL, LONG))
def test_export_is_the_checkpoint_bit_by_bit(families: Path, name: str) -> None:
    stored = load_file(families / "models" / FAMILY_LAYOUTS[name].kind / "model.safetensors")
    exported, _ = read(families / "results", f"{name}-before")
    assert exported.keys() == stored.keys()
    for tensor_name, tensor in stored.items():
        is_half = name in HALF and "correction_bias" not in tensor_name
        assert exported[tensor_name].dtype == tensor.dtype == (torch.bfloat16 if is_half else torch.float32)
        assert torch.equal(exported[tensor_name], tensor), tensor_name


@pytest.mark.parametrize("name", marked(ALL, LONG))
def test_logprobs_are_those_of_transformers(families: Path, name: str) -> None:
    _, answers = read(families / "results", f"{name}-before")
    # Two float32 forwards of logits of size 5 differ by a few times 5 x 2^-24; in bfloat16 every activation is rounded
    # by 2^-9.
    tolerance = 0.3 if name in HALF else 1e-5
    want = logprobs_of_transformers(families / "models" / FAMILY_LAYOUTS[name].kind)
    np.testing.assert_allclose(np.concatenate(answers["logprobs"]), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        *(("gpt_oss", mistake) for mistake in ("sinks", "bias", "window", "clamp", "truncate")),
        *(("olmo3", mistake) for mistake in ("window", "scaled", "unscaled")),
    ],
)
def test_a_mistake_is_above_the_tolerance(families: Path, tmp_path: Path, kind: str, mistake: str) -> None:
    """Compares with a model that is without its sinks or biases, or one key of whose config is another."""
    _, answers = read(families / "results", f"{kind}-before")
    shutil.copytree(families / "models" / kind, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    match mistake:
        case "window":
            config["sliding_window"] += 1
        case "clamp":
            config["swiglu_limit"] += 0.1
        case "truncate":
            config["rope_parameters"]["truncate"] = True
        case "scaled":
            config["rope_parameters"]["sliding_attention"] = config["rope_parameters"]["full_attention"]
        case "unscaled":
            config["rope_parameters"]["full_attention"] = config["rope_parameters"]["sliding_attention"]
        case _:
            tensors = load_file(tmp_path / "model.safetensors")
            changed = {
                name: tensor - 100 if mistake == "sinks" else tensor * 0
                for name, tensor in tensors.items()
                if name.endswith(mistake)
            }
            save_file(tensors | changed, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    gap = np.abs(np.concatenate(answers["logprobs"]) - logprobs_of_transformers(tmp_path)).max()
    assert gap > 1e-3


@pytest.mark.parametrize("name", marked([*FAMILIES, *SPLIT, *OF_FOUR, ROUTED], LONG))
def test_update_is_that_of_fsdp(families: Path, harness: Harness, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Tests the update also of biases and routers, and which weights decay and which do not."""
    after, answers = read(families / "results", f"{name}-after")
    monkeypatch.setattr(harness, "_models", families / "models")
    fsdp = on_fsdp(harness, FAMILY_LAYOUTS[name].kind, is_routed=name == ROUTED)
    assert answers["updates"][0] == pytest.approx(fsdp.metrics, rel=5e-6, abs=5e-6)
    assert after.keys() == fsdp.after.keys()
    for tensor_name, tensor in fsdp.after.items():
        gap = (after[tensor_name].double() - tensor.double()).abs().max() / tensor.double().abs().max()
        assert gap < 3e-6, f"{tensor_name}: {gap:.3g}"


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    make_family(tmp_path, "glm4_moe")
    model, tensors = read_architecture(tmp_path), load_file(tmp_path / "model.safetensors")
    assert model.num_mtp_layers == 1
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    require_loadable(model, str(tmp_path), is_critic=False)
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with raises(InvalidInput, field="model"):
        require_loadable(model, str(tmp_path), is_critic=False)


@dataclass(frozen=True)
class OnFsdp:
    """What FSDP computes with a family: before one update, in it and after it."""

    before: dict[str, torch.Tensor]
    logprobs: np.ndarray
    metrics: dict[str, float]
    after: dict[str, torch.Tensor]


@functools.cache
def on_fsdp(harness: Harness, kind: str, *, is_routed: bool) -> OnFsdp:
    """Opens the family once for all tests; the samples of the update may have routed experts."""
    harness.open(kind, {"loss": LOSS})
    before, logprobs = weights_of(harness), np.concatenate(harness.logprobs(samples()))
    metrics = harness.train(with_routed_experts(samples()) if is_routed else samples())
    return OnFsdp(before, logprobs, metrics, weights_of(harness))


def weights_of(harness: Harness) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in harness.backend.weights()}


@pytest.mark.parametrize("kind", marked(FAMILIES, LONG))
def test_fsdp_computes_and_exports_the_same_model(
    families: Path, harness: Harness, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(harness, "_models", families / "models")
    fsdp = on_fsdp(harness, kind, is_routed=False)
    np.testing.assert_allclose(fsdp.logprobs, logprobs_of_transformers(families / "models" / kind), rtol=0, atol=1e-5)
    stored = load_file(families / "models" / kind / "model.safetensors")
    assert fsdp.before.keys() == stored.keys()
    assert all(torch.equal(fsdp.before[name], tensor) for name, tensor in stored.items())


@functools.cache
def logprobs_of_transformers(model_path: Path) -> np.ndarray:
    """Returns the log-probabilities of all completion tokens of `samples`, computed in float32."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        return np.concatenate([plain_grpo.score(model, row, TEMPERATURE)[0] for row in samples().to_pylist()])
