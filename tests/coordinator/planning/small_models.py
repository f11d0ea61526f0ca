"""Models whose numbers can be counted by hand, and configs of runs that train them."""

import json
from pathlib import Path
from typing import Any

from services.common.config.run import Config
from services.common.families.architecture import Architecture, read_architecture

SHAPE = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
DENSE = {"model_type": "qwen3", "intermediate_size": 128, **SHAPE}
MOE = {
    "model_type": "qwen3_moe",
    "intermediate_size": 128,  # the size of dense layers, of which it has none
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    **SHAPE,
    "tie_word_embeddings": False,
}


def write(directory: Path, content: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def make(directory: Path | None, **trainer: Any) -> tuple[Config, Architecture]:
    tree = {
        "model": str(directory),
        "runs_dir": f"{directory}/runs",
        "data": {"train": "a.parquet", "prompts_per_step": 8},
        "reward": {"scorers": [{"kind": "exact"}]},
        "weights": {"bucket_bytes": 2**16},
        "reference": trainer.pop("reference", {}),
        **trainer.pop("distilled", {}),
        "trainer": {"strategy": "megatron", **trainer},
    }
    model = read_architecture(directory) if directory else Architecture("llama", *[1] * 7, False)
    return Config.model_validate(tree), model


def sizes(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        **more,
    }
