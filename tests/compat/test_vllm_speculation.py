"""Tests the internals of vLLM that speculative decoding uses, and that each patch is still needed. Starts no engine."""

import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from vllm.config.speculative import SpeculativeConfig
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.utils import cpu_triton_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.worker_base import WorkerWrapperBase

from services.common.config.rollout import (
    Eagle3SpeculationConfig,
    NgramSpeculationConfig,
    SpeculationConfig,
    SuffixSpeculationConfig,
)
from services.rollout.arguments import RolloutConfig, engine_arguments
from services.rollout.compat import client, scheduler
from services.rollout.compat.client import register_kernels
from services.rollout.compat.patches import copy_temperatures, expand


def test_vllms_function_for_cpu_drops_what_is_no_integer() -> None:
    """If this fails, temperatures.py is not needed."""
    vllms: Any = inspect.unwrap(cpu_triton_utils._expand_kernel_impl)
    if vllms is expand:  # an earlier test of this process has loaded the plugin
        pytest.skip("vLLM's function is already replaced in this process")
    source = inspect.getsource(vllms)
    assert "_ensure_int64(output)" in source and "copy_" not in source


def test_every_token_gets_the_temperature_of_its_sample() -> None:
    temperatures, ends = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 3, 3], dtype=torch.int32)
    tokens = torch.full((3,), torch.nan)
    expand(tokens, temperatures, ends, replace_from=0, replace_to=1, MAX_NUM_TOKENS=128)
    assert torch.equal(tokens, torch.tensor([0.7, 0.7, 1.0]))
    top_k = torch.zeros(3, dtype=torch.int32)
    expand(top_k, torch.tensor([5, 0, 7], dtype=torch.int32), ends, 0, 0)
    assert top_k.tolist() == [5, 5, 0]


def test_vllm_takes_the_function_that_the_plugin_has_put_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_triton_utils, "_expand_kernel_impl", None)
    copy_temperatures()
    assert cpu_triton_utils._expand_kernel_impl is expand
    assert "cpu_tl._expand_kernel_impl" in inspect.getsource(CpuPlatform.register_triton_kernel_overrides)
    arguments = list(inspect.signature(expand).parameters)
    assert arguments[1:] == ["input_val", "cu_num_tokens", "replace_from", "replace_to", "MAX_NUM_TOKENS"]
    assert "expand_batch_to_tokens(\n        sampling_metadata.temperature" in inspect.getsource(rejection_sampler)


def test_kernels_are_replaced_once_before_engines_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    name, replaced = "register_triton_kernel_overrides", []
    monkeypatch.setattr(current_platform, name, lambda: replaced.append(cpu_triton_utils._expand_kernel_impl))
    monkeypatch.setattr(cpu_triton_utils, "_expand_kernel_impl", None)
    register_kernels()
    current_platform.register_triton_kernel_overrides()  # as a fork does
    assert replaced == [expand]  # not vLLM's own
    assert f"current_platform.{name}()" in inspect.getsource(WorkerWrapperBase.init_worker)
    monkeypatch.setattr(client, "current_platform", None)  # as of a vLLM that replaces no kernels
    register_kernels()


def test_the_scheduler_counts_each_draft_of_each_sample() -> None:
    counted = ["num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id"]
    assert list(inspect.signature(Scheduler.make_spec_decoding_stats).parameters)[2:] == counted
    call = inspect.getsource(Scheduler.update_from_output).partition("self.make_spec_decoding_stats(")[2]
    assert all(f"{name}=" in call[:400] for name in counted)  # passed by name, whether vLLM keeps statistics or not
    assert "kv_transfer_params" in {field.name for field in msgspec.structs.fields(EngineCoreOutput)}
    assert "kv_transfer_params" in inspect.signature(RequestOutput.__init__).parameters


@pytest.mark.parametrize(
    "speculation",
    [
        NgramSpeculationConfig(),
        SuffixSpeculationConfig(kind="suffix"),
        Eagle3SpeculationConfig(kind="eagle3", draft=Path("/heads/one")),
    ],
)
def test_vllm_has_every_setting(speculation: SpeculationConfig) -> None:
    config = RolloutConfig(speculation=speculation, max_samples=2000)
    again = RolloutConfig.model_validate_json(config.model_dump_json())  # as it is sent to the service
    arguments = engine_arguments(again, "model", seed=0)
    assert set(arguments["speculative_config"]) <= set(inspect.signature(SpeculativeConfig).parameters)
    assert arguments["speculative_config"] == speculation.for_vllm()
    assert arguments["max_num_batched_tokens"] >= 2000 * (1 + speculation.num_tokens)
    # Held tokens and one more step stay below the 64 numbers that vLLM would send as a frame of their own.
    most = type(speculation).model_fields["num_tokens"].metadata[1].le
    assert scheduler._CHUNK_TOKENS - 1 + most + 1 < 64
