"""Models that FSDP would compute or publish otherwise than transformers does are refused when a run is opened."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM, Lfm2Config, PhiConfig

from services.common.errors import InvalidInput
from services.trainer.backend import Role
from services.trainer.checkpoint.manifest import begin
from tests.trainer.fsdp_harness import SMALL, Harness, config

TINY = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def copied(trainer_files: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trainer_files / "models" / "untied", tmp_path / "model"))


def open_model(harness: Harness, model: Path) -> None:
    config_json = config().model_dump_json()
    paths = {"model_path": str(model), "checkpoint_path": ""}
    harness.worker.open(role=Role.POLICY, config_json=config_json, **paths, seed=0, bucket_bytes=1 << 20)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"final_logit_softcapping": 0.5}, "final_logit_softcapping"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None}, "sliding"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention"),
    ],
)
def test_settings_of_a_model(harness: Harness, copied: Path, changes: dict[str, Any], named: str) -> None:
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(
        InvalidInput, match=f"model: .*{named}.* (is|are) not supported (with strategy fsdp|by any strategy)"
    ):
        open_model(harness, copied)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: PhiConfig(**TINY), "lm_head.bias"),
        (lambda: Lfm2Config(**TINY, layer_types=["conv", "full_attention"]), "layers of type conv"),
        (lambda: Lfm2Config(**TINY, layer_types=None, full_attn_idxs=[1]), "layers of type conv"),
    ],
)
def test_architectures(harness: Harness, copied: Path, other: Callable[[], Any], named: str) -> None:
    other().save_pretrained(copied)
    with pytest.raises(InvalidInput, match=named):
        open_model(harness, copied)


def test_a_tensor_that_no_engine_would_get(harness: Harness, copied: Path) -> None:
    file = copied / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.sinks": torch.zeros(4)}, file, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"model\.layers\.0\.self_attn\.sinks in its checkpoint"):
        open_model(harness, copied)


def test_buffers_of_a_checkpoint_are_published_and_exported(harness: Harness, copied: Path, tmp_path: Path) -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
    model = Glm4MoeForCausalLM(
        Glm4MoeConfig(**TINY, **experts, num_key_value_heads=2, head_dim=16, first_k_dense_replace=1, eos_token_id=1)
    )
    bias = torch.tensor([5.0, -5.0, 5.0, -5.0])
    model.get_buffer(BIAS).copy_(bias)
    model.save_pretrained(copied)
    open_model(harness, copied)
    assert {name: tensor.dtype for name, tensor in harness.backend.weight_specs()}[BIAS] is torch.float32
    assert torch.equal(dict(harness.backend.weights())[BIAS].cpu(), bias)
    begin(tmp_path / "exported")
    harness.worker.export(path=str(tmp_path / "exported"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = torch.arange(2, 20)[None]
    torch.testing.assert_close(exported(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)


def test_resuming_takes_the_optimizers_settings_of_now(harness: Harness, tmp_path: Path) -> None:
    harness.open("untied", SMALL | {"optim": {"betas": (0.9, 0.999), "eps": 1e-3}})
    begin(tmp_path / "checkpoint")
    harness.worker.save(
        path=str(tmp_path / "checkpoint"), state={"version": 0, "last_batch_id": "", "last_metrics": {}}
    )
    harness.open(
        "untied", SMALL | {"optim": {"betas": (0.5, 0.6), "eps": 1e-5}}, checkpoint=str(tmp_path / "checkpoint")
    )
    groups = harness.backend._optimizer.param_groups
    assert {(tuple(group["betas"]), group["eps"]) for group in groups} == {((0.5, 0.6), 1e-5)}
