"""Tests what vLLM makes of the engine's arguments."""

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING
from vllm.engine.arg_utils import AsyncEngineArgs

from services.common.config.rollout import RolloutConfig
from services.rollout.arguments import engine_arguments, leave_out_states
from tests.trainer.zoo import ZOO


@pytest.mark.usefixtures("inspects_here")
def test_recurrent_states_are_cached_only_with_parts_of_prompts(tmp_path: Path) -> None:
    """If no error is raised, drop `leave_out_states`."""
    made: dict[str, list[AsyncEngineArgs]] = {}
    for name, architecture in (("falcon_h1", "FalconH1ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")):
        CONFIG_MAPPING[name](**ZOO[name][1], architectures=[architecture]).save_pretrained(tmp_path / name)
        settings = engine_arguments(RolloutConfig(max_model_len=64), str(tmp_path / name), seed=0)
        made[name] = [AsyncEngineArgs(**settings | {"enable_chunked_prefill": False}) for _ in range(2)]
        leave_out_states(made[name][1])
    as_it_is, without = made["falcon_h1"]
    with pytest.raises(ValueError, match="Chunked prefill is required"):
        as_it_is.create_engine_config()
    assert without.create_engine_config().cache_config.enable_prefix_caching is False
    assert made["qwen3"][1].enable_prefix_caching is None


@pytest.mark.parametrize(
    ("forks", "settings", "backend"),
    [
        (True, {}, "mp"),
        (False, {}, None),  # a worker in a new interpreter would import everything again
        (True, {"engine": {"data_parallel_size": 2}}, None),
        (True, {"speculation": {"kind": "ngram"}}, None),
        (True, {"engine": {"distributed_executor_backend": "uni"}}, "uni"),
    ],
)
def test_on_a_gpu_a_forked_worker_has_a_process_of_its_own(
    forks: bool, settings: dict[str, object], backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("services.rollout.arguments.forks_engines", lambda: forks)
    made = engine_arguments(RolloutConfig.model_validate(settings), "model", seed=0)
    assert made.get("distributed_executor_backend") == backend
