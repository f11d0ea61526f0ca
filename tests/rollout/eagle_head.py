"""Makes an EAGLE-3 head without training, some of whose drafts are accepted."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn


def make_head(directory: Path, model: nn.Module) -> Path:
    """Writes a head for `model`, with two layers, that drafts what the model's output layer says of its first layer."""
    config = model.config
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    rows, kv_rows = config.num_attention_heads * size, config.num_key_value_heads * size
    shapes = {
        "self_attn.q_proj": (rows, 2 * hidden),
        "self_attn.k_proj": (kv_rows, 2 * hidden),
        "self_attn.v_proj": (kv_rows, 2 * hidden),
        "self_attn.o_proj": (hidden, rows),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights = {f"midlayer.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    weights |= {f"midlayer.{name}.weight": torch.ones(hidden) for name in norms}
    # Of the hidden states before both layers it passes on the second.
    weights["fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    weights |= {"norm.weight": torch.ones(hidden), "lm_head.weight": model.lm_head.weight.detach().clone()}
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    card = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [0, 1],
        "num_aux_hidden_states": 2,
        "torch_dtype": "float32",
    }
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    card |= {name: getattr(config, name) for name in (*same, "max_position_embeddings")}
    (directory / "config.json").write_text(json.dumps(card))
    return directory
