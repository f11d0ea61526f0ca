"""Tests what is loaded beside parameters: buffers of a checkpoint, and the state of an optimizer."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from services.trainer.backend import Role
from services.trainer.checkpoint.manifest import begin
from services.trainer.fsdp import loading
from services.trainer.fsdp.model import LogprobModel
from tests.trainer.fsdp_harness import SMALL, Harness, config, samples
from tests.trainer.zoo_harness import make_zoo_model

TINY = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
CORRECTION_BIAS = "e_score_correction_bias"
BIAS = f"model.layers.1.mlp.gate.{CORRECTION_BIAS}"
VALUES = torch.tensor([5.0, -5.0, 5.0, -5.0])


@pytest.fixture
def copied(trainer_files: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trainer_files / "models" / "untied", tmp_path / "model"))


def open_model(harness: Harness, model: Path) -> None:
    config_json = config().model_dump_json()
    paths = {"model_path": str(model), "checkpoint_path": ""}
    harness.worker.open(role=Role.POLICY, config_json=config_json, **paths, seed=0, bucket_bytes=1 << 20)


def save_with_bias(directory: Path) -> Glm4MoeForCausalLM:
    """Saves a model whose router has a correction bias, a buffer of the checkpoint."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
    model = Glm4MoeForCausalLM(
        Glm4MoeConfig(**TINY, **experts, num_key_value_heads=2, head_dim=16, first_k_dense_replace=1, eos_token_id=1)
    )
    model.get_buffer(BIAS).copy_(VALUES)
    model.save_pretrained(directory)
    return model


def test_buffers_of_a_checkpoint_are_published_and_exported(harness: Harness, copied: Path, tmp_path: Path) -> None:
    model = save_with_bias(copied)
    open_model(harness, copied)
    assert {name: tensor.dtype for name, tensor in harness.backend.weight_specs()}[BIAS] is torch.float32
    assert torch.equal(dict(harness.backend.weights())[BIAS].cpu(), VALUES)
    begin(tmp_path / "exported")
    harness.worker.export(path=str(tmp_path / "exported"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = torch.arange(2, 20)[None]
    torch.testing.assert_close(exported(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)


def as_gemma_on_the_hub(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return name.replace("vision_tower.", "vision_tower.vision_model."), tensor


def as_qwen_on_the_hub(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    is_experts = ".experts." in name
    return name, tensor.transpose(1, 2).contiguous() if is_experts else tensor


@pytest.mark.parametrize(
    ("name", "as_on_the_hub"), [("gemma3", as_gemma_on_the_hub), ("qwen3_vl_moe", as_qwen_on_the_hub)]
)
def test_older_names_and_shapes_are_read_and_published(
    harness: Harness, tmp_path: Path, name: str, as_on_the_hub: Callable[..., tuple[str, torch.Tensor]]
) -> None:
    model = make_zoo_model(name, tmp_path / "model")
    new = load_file(model / "model.safetensors")
    harness.open(str(model), {})
    want = harness.logprobs(samples())
    assert {key: tensor.shape for key, tensor in harness.backend.weights()} == {k: t.shape for k, t in new.items()}
    old = dict(as_on_the_hub(key, tensor) for key, tensor in new.items())
    assert [(key, tensor.shape) for key, tensor in old.items()] != [(key, tensor.shape) for key, tensor in new.items()]
    save_file(old, model / "model.safetensors", metadata={"format": "pt"})
    harness.open(str(model), {})
    np.testing.assert_array_equal(np.concatenate(harness.logprobs(samples())), np.concatenate(want))
    published = dict(harness.backend.weights())
    assert {key: tensor.shape for key, tensor in harness.backend.weight_specs()} == {k: t.shape for k, t in old.items()}
    assert published.keys() == old.keys()
    assert all(torch.equal(published[key], tensor) for key, tensor in old.items())


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", ["deepseek_v3", "ernie4_5_moe", "minimax_m2"])
def test_correction_biases_are_not_rounded(harness: Harness, tmp_path: Path, name: str, rank: int) -> None:
    """Published ones are near 10, where steps of bfloat16 are 0.06. MiniMax's transformers itself would round."""
    model = make_zoo_model(name, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    biases = {key: tensor.uniform_(10, 10.05) for key, tensor in tensors.items() if key.endswith(CORRECTION_BIAS)}
    assert biases
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    harness.open(str(model), {"compute_dtype": "bfloat16", "lora": {"rank": rank}})
    seen: list[torch.dtype] = []
    for module in harness.backend._model.modules():
        if hasattr(module, CORRECTION_BIAS):
            module.register_forward_pre_hook(lambda module, _: seen.append(module.e_score_correction_bias.dtype))
    assert harness.logprobs(samples())
    assert set(seen) == {torch.float32}
    specs, published = dict(harness.backend.weight_specs()), dict(harness.backend.weights())
    for key, bias in biases.items():
        assert (specs[key].dtype, published[key].tolist()) == (torch.float32, bias.tolist())


def test_buffers_are_loaded_beside_offloaded_weights_and_then_moved(
    harness: Harness, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device `meta` stands for a GPU: there is none here."""
    open_model(harness, copied)  # it makes the process group
    save_with_bias(copied)
    loaded = dict[str, torch.Tensor]()

    def load(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}  # torch takes no other state
        set_model_state_dict(model, *args, **kwargs)
        loaded.update((name, buffer.clone()) for name, buffer in model.named_buffers())

    monkeypatch.setattr(loading, "set_model_state_dict", load)
    monkeypatch.setattr(loading, "_shard", lambda *_: None)
    mesh: Any = SimpleNamespace(device_type="meta", get_rank=lambda: 0)
    dtypes = {"weight_dtype": torch.float32, "compute_dtype": torch.float32}
    model = loading.build(LogprobModel, str(copied), config({"fsdp": {"cpu_offload": True}}), mesh, **dtypes)
    assert torch.equal(loaded[f"causal_lm.{BIAS}"], VALUES)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


def test_resuming_takes_the_optimizers_settings_of_now(harness: Harness, tmp_path: Path) -> None:
    harness.open("untied", SMALL | {"optim": {"betas": (0.9, 0.999), "eps": 1e-3}})
    begin(tmp_path / "checkpoint")
    harness.worker.save(
        path=str(tmp_path / "checkpoint"), state={"version": 0, "last_batch_id": "", "last_metrics": {}}
    )
    harness.open(
        "untied", SMALL | {"optim": {"betas": (0.5, 0.6), "eps": 1e-5}}, checkpoint=str(tmp_path / "checkpoint")
    )
    groups = harness.backend._optimizers[0].param_groups
    assert {(tuple(group["betas"]), group["eps"]) for group in groups} == {((0.5, 0.6), 1e-5)}
