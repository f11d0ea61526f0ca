"""What the trainer uses inside transformers is there."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.trainer.compat.transformers import ignored_tensors


def test_a_model_says_which_tensors_it_leaves_out() -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=1))
    assert hasattr(model, "_keys_to_ignore_on_load_unexpected")
    assert list(ignored_tensors(model)) == []
    model._keys_to_ignore_on_load_unexpected = [r"model\.extra"]
    assert list(ignored_tensors(model)) == [r"model\.extra"]


def test_no_public_name_says_it() -> None:
    assert not hasattr(Qwen3ForCausalLM, "keys_to_ignore_on_load_unexpected")  # else use that
