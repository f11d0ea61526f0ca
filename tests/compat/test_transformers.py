"""Tests the internals of transformers that trainer and coordinator use."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import chat_template_utils

from services.trainer.compat.transformers import ignored_tensors, keeping_float32, routers, set_choice, take_layout


def test_a_model_says_which_tensors_it_leaves_out() -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=1))
    assert hasattr(model, "_keys_to_ignore_on_load_unexpected")
    assert list(ignored_tensors(model)) == []
    model._keys_to_ignore_on_load_unexpected = [r"model\.extra"]
    assert list(ignored_tensors(model)) == [r"model\.extra"]


def test_no_public_name_says_it() -> None:
    assert not hasattr(Qwen3ForCausalLM, "keys_to_ignore_on_load_unexpected")  # else use that


def test_a_tensor_is_kept_in_float32(tmp_path: Path) -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2))
    model.save_pretrained(tmp_path)
    with keeping_float32("q_norm"):
        kept = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {name for name, one in kept.named_parameters() if one.dtype is torch.float32} == {
        f"model.layers.{number}.self_attn.q_norm.weight" for number in range(2)
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {one.dtype for one in loaded.parameters()} == {torch.bfloat16}


def test_a_model_takes_the_prefix_that_a_checkpoint_has() -> None:
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SMALL, num_key_value_heads=2))
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    old = {name.replace("model.", "model.language_model."): shape for name, shape in own.items()}
    for stored in (own, old):
        take_layout(model, stored)
        assert revert_weight_conversion(model, model.state_dict()).keys() == stored.keys()


SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 8}


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_router_computes_with_the_experts_that_it_is_given(kind: str) -> None:
    config = AutoConfig.for_model(kind, **SMALL, num_key_value_heads=2, num_experts_per_tok=2)
    found = routers(AutoModelForCausalLM.from_config(config))
    assert len(found) == 2
    with torch.no_grad():
        found[0].weight.normal_()
    hidden = torch.randn(5, 16)
    logits, own_scores, own = found[0](hidden)
    given = own.flip(-1) if kind == "mixtral" else own.roll(1, 0)
    set_choice(found[0], lambda seen: given if torch.equal(seen, own) else seen)
    _, scores, experts = found[0](hidden)
    assert torch.equal(experts, given)
    if kind == "mixtral":
        assert torch.allclose(scores, own_scores.flip(-1))
    else:
        every = logits.softmax(-1).gather(-1, given)
        is_normalized = found[0].norm_topk_prob
        assert torch.allclose(scores, every / every.sum(-1, keepdim=True) if is_normalized else every)
    scores.sum().backward()
    assert is_finite_gradient(found[0].weight)


def is_finite_gradient(weight: torch.Tensor) -> bool:
    return weight.grad is not None and bool(weight.grad.isfinite().all())


def test_a_dense_model_has_no_routers() -> None:
    with torch.device("meta"):
        assert routers(Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=1))) == []


def test_the_tokenizer_of_the_coordinator_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from services.coordinator.compat import compile_template, import_transformers\n"
        "import_transformers()\n"
        "print(compile_template('{{ 1 + 1 }}').render(), sorted({'torch'} & sys.modules.keys()))\n"
        "from importlib.metadata import packages_distributions\n"
        "from transformers.utils.import_utils import PACKAGE_DISTRIBUTION_MAPPING\n"
        "print(PACKAGE_DISTRIBUTION_MAPPING, bool(packages_distributions()))\n"
        "import torch\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2 []\n{} True\n"), done.stderr


def test_threads_import_it_at_the_same_moment() -> None:
    """A daemon reads the data of two runs that start together, each in a thread."""
    program = (
        "import sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from services.coordinator.compat import import_tensorboardx, import_transformers\n"
        "def load(number):\n"
        "    if number == 2:\n"
        "        return import_tensorboardx()\n"
        "    import_transformers()\n"
        "    from transformers import AutoTokenizer\n"
        "with ThreadPoolExecutor(4) as threads:\n"
        "    list(threads.map(load, range(4)))\n"
        "from importlib.metadata import packages_distributions\n"
        "print(sorted({'torch'} & sys.modules.keys()), bool(packages_distributions()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[] True\n"), done.stderr


def test_no_public_function_compiles_a_template() -> None:
    assert not hasattr(chat_template_utils, "compile_jinja_template")  # else use that
