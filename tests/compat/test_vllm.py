"""Tests the internals of vLLM that the rollout service uses, and that each patch is still needed. Starts no engine."""

import asyncio
import functools
import inspect
import json
import multiprocessing
from array import array
from dataclasses import fields
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import vllm.envs
from torch import nn
from vllm import SamplingParams
from vllm.config import ModelConfig, ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.device_allocator import AllocationData, cumem
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.layers import BaseLayerWithLoRA, ColumnParallelLinearWithLoRA
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod, routed_experts_capturer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
    record_metadata_for_reloading,
)
from vllm.utils.system_utils import get_mp_context
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor.abstract import SLEEP_TAGS
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

from services.common.config.rollout import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from services.rollout.compat.vllm import engine_fork, recorded, worker
from services.rollout.compat.vllm.client import abort_samples, forbid, stop_reading
from services.rollout.compat.vllm.scheduler import kind_of
from services.rollout.compat.vllm.worker import rank_of
from services.rollout.receiver import WeightReceiver

BAD_WORD_LIMITS = {"NUM_BAD_WORDS": MAX_BAD_WORDS, "BAD_WORDS_TOTAL_TOKENS": MAX_BAD_WORD_TOKENS}
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


# ---- engine_fork


def test_vllm_has_no_name_for_the_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METHOD, "forkserver")
    with pytest.raises(ValueError, match="forkserver"):  # if this fails, set the variable
        vllm.envs.environment_variables[METHOD]()


def test_vllm_takes_the_method_that_is_put_into_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vllm.envs.environment_variables, METHOD, lambda: "forkserver")
    assert get_mp_context() is multiprocessing.get_context("forkserver")


def test_pythons_fork_server_can_be_replaced() -> None:
    server = vars(forkserver._forkserver)
    assert {"_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"} <= server.keys()
    assert names(forkserver.main)[:3] == ["listener_fd", "alive_r", "preload"]
    assert find_spec(engine_fork.CPU_WORKER) is not None


# ---- client


def test_a_pause_of_the_engine_is_one_call_and_vllms_own_sleeps_too() -> None:
    assert {"mode", "clear_cache"} <= set(names(AsyncMPClient.pause_scheduler_async))
    asked = []

    class Core:
        async def pause_scheduler_async(self, **how: Any) -> None:
            asked.append(how)

    asyncio.run(abort_samples(SimpleNamespace(engine_core=Core())))
    assert asked == [{"mode": "abort", "clear_cache": False}]
    source = inspect.getsource(AsyncLLM.pause_generation)
    assert "self.engine_core.pause_scheduler_async(" in source and "sleep(" in source  # if this fails, call it


async def test_what_reads_an_engine_is_ended_before_it_and_tells_who_waits() -> None:
    reading, waits = asyncio.create_task(asyncio.Event().wait()), asyncio.Queue[Exception]()
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    processor.request_states["r"] = SimpleNamespace(queue=SimpleNamespace(put=waits.put_nowait))  # type: ignore[assignment]
    await stop_reading(SimpleNamespace(output_handler=reading, output_processor=processor))  # type: ignore[arg-type]
    assert reading.cancelled()
    assert isinstance(waits.get_nowait(), EngineDeadError)
    source = inspect.getsource(AsyncLLM.shutdown)
    # If the task is canceled first, stop_reading is not needed.
    assert source.index("engine_core.shutdown(") < source.index("cancel_task_threadsafe(handler)")


def test_bad_words_are_given_as_tokens() -> None:
    sampling = forbid(SamplingParams(), [[5], [6, 7]])
    assert sampling.bad_words_token_ids == [[5], [6, 7]]
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams)  # to the engine
    assert sent.bad_words_token_ids == [[5], [6, 7]]
    sampling.update_from_tokenizer(None)  # type: ignore[arg-type]
    assert sampling.bad_words_token_ids == [[5], [6, 7]]
    assert not SamplingParams().bad_words_token_ids
    defaults = {name: vllm.envs.environment_variables[f"VLLM_MAX_{name}"]() for name in BAD_WORD_LIMITS}
    assert defaults == BAD_WORD_LIMITS


def test_the_sampler_masks_bad_words_before_it_samples() -> None:
    source = inspect.getsource(Sampler.forward)
    assert source.index("self.apply_logits_processors(") < source.index("self.sample(")
    assert "apply_bad_words(" in inspect.getsource(Sampler.apply_logits_processors)


# ---- compiled


def test_compiled_models_are_looked_up_by_the_model_card_and_not_by_its_path(tmp_path: Path) -> None:
    models = {}
    for name, hidden_size in (("first", 32), ("same", 32), ("wider", 64)):
        card = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden_size}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(card | {"head_dim": 16, "num_hidden_layers": 2}))
        arguments = AsyncEngineArgs(str(tmp_path / name), skip_tokenizer_init=True)  # loads the plugin
        models[name] = arguments.create_model_config()
    hashes = {name: model.compute_hash() for name, model in models.items()}
    assert hashes["first"] == hashes["same"] != hashes["wider"]
    assert models["same"].model == str(tmp_path / "same")
    original: Any = ModelConfig.compute_hash
    with_path = original.__wrapped__
    assert with_path(models["first"]) != with_path(models["same"])  # if this fails, drop ignore_model_path


# ---- scheduler


def test_schedulers_say_what_is_sent_and_what_was_aborted() -> None:
    assert names(Scheduler.update_from_output) == ["self", "scheduler_output", "model_runner_output"]
    assert inspect.signature(Scheduler.update_from_output).return_annotation == dict[int, EngineCoreOutputs]
    assert names(Scheduler.finish_requests)[:2] == ["self", "request_ids"]
    assert inspect.signature(Scheduler.finish_requests).return_annotation == list[Request]
    assert issubclass(AsyncScheduler, Scheduler)
    sent = {"request_id", "new_token_ids", "new_logprobs", "finish_reason", "events"}
    assert sent <= {field.name for field in msgspec.structs.fields(EngineCoreOutput)}
    together = {"outputs", "scheduler_stats", "finished_requests"}
    assert together <= {field.name for field in msgspec.structs.fields(EngineCoreOutputs)}


def test_logprobs_are_built_from_three_arrays() -> None:
    lists = LogprobsLists(np.array([[1]]), np.array([[-0.5]]), np.array(array("i", [2])))
    assert (lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks) == ([[1]], [[-0.5]], [2])
    assert len(lists) == 4 and lists.cu_num_generated_tokens is None


def test_the_scheduler_only_slices_logprobs() -> None:
    source = inspect.getsource(Scheduler.update_from_output)
    assert "logprobs = model_runner_output.logprobs\n" in source
    assert "new_logprobs = logprobs.slice_request(req_index, len(new_token_ids))" in source
    assert names(LogprobsLists.slice_request) == ["self", "req_idx", "num_positions"]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_scheduler_is_of_the_kind_that_vllm_takes(is_async: bool) -> None:
    config = SimpleNamespace(scheduler_cls=None, async_scheduling=is_async)
    assert SchedulerConfig.get_scheduler_cls(config) is kind_of(SimpleNamespace(scheduler_config=config))


# ---- worker


def test_a_worker_has_what_the_extension_reads() -> None:
    source = inspect.getsource(WorkerBase.__init__)
    for name in ("vllm_config", "model_config", "rank", "device"):
        assert f"self.{name} = " in source or f"self.{name}: " in source
    assert names(CPUWorker.add_lora) == ["self", "lora_request"]
    assert names(GPUModelRunner.get_model) == ["self"]
    assert "self.model_runner" in inspect.getsource(CPUWorker)
    assert {"world_size", "data_parallel_index"} <= {field.name for field in fields(ParallelConfig)}


def test_the_extension_collides_with_no_attribute_of_a_worker() -> None:
    own = [name for name in dir(WeightReceiver) if not name.startswith("__")]
    assert own and all(name.startswith(("lockstep_", "_lockstep_")) for name in own)
    assert not [name for name in own if hasattr(CPUWorker, name)]


def test_a_workers_rank_counts_data_parallelism() -> None:
    parallel = SimpleNamespace(world_size=4, data_parallel_index=2)
    assert rank_of(SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel), rank=3)) == 11


# ---- memory


@pytest.mark.parametrize("knows_sleep", [True, False])  # without is_asleep, an allocation sleeps with its tag
def test_allocations_of_sleep_mode_say_their_size_and_part(monkeypatch: pytest.MonkeyPatch, knows_sleep: bool) -> None:
    assert {"handle", "tag"} <= {field.name for field in fields(AllocationData)}
    allocator = cumem.CuMemAllocator()
    monkeypatch.setattr(cumem, "cumem_available", True)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    kind = AllocationData if knows_sleep else lambda handle, tag, **_: SimpleNamespace(handle=handle, tag=tag)
    sizes = {worker.WEIGHTS: [10, 20], worker.KV_CACHE: [300], "cudagraph": [4000]}
    for tag, parts in sizes.items():
        for size in parts:
            handle = (0, size, len(allocator.pointer_to_data), 0)
            allocator.pointer_to_data[handle[2]] = kind(handle, tag, is_asleep=True)
    both = (worker.WEIGHTS, worker.KV_CACHE)
    assert worker.asleep_bytes(()) == 0
    assert worker.asleep_bytes(both) == (4330 if knows_sleep else 330)
    assert worker.wake_bytes(worker.WEIGHTS, both) == (4030 if knows_sleep else 30)
    assert worker.wake_bytes(worker.KV_CACHE, both) == (4300 if knows_sleep else 300)


def test_vllm_sleeps_and_wakes_by_parts() -> None:
    assert names(AsyncLLM.sleep)[:2] == ["self", "level"]
    assert names(AsyncLLM.wake_up) == ["self", "tags"]
    assert {worker.WEIGHTS, worker.KV_CACHE} <= set(SLEEP_TAGS)
    # On CPU, sleep does nothing, so the workers overwrite the weights themselves. If this fails, remove their code.
    assert "not supported on CPU" in inspect.getsource(CPUWorker.sleep)


# ---- reload


class Model(nn.Module):
    """Has one layer of two tensors, as vLLM would load it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        for name in ("weight", "bias"):
            self.layer.register_parameter(name, nn.Parameter(torch.zeros(2), requires_grad=False))
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            parameter = self.layer.get_parameter(name)
            getattr(parameter, "weight_loader", lambda param, loaded: param.data.copy_(loaded))(parameter, tensor)


def test_the_reloads_functions_are_called_as_vllm_defines_them() -> None:
    assert names(initialize_layerwise_reload) == ["model"]
    assert names(layerwise.finalize_layerwise_processing) == ["model", "model_config"]
    assert names(layerwise._place_kernel_tensors) == ["layer", "info"]
    info = layerwise.get_layerwise_info(Model().layer)
    assert info.kernel_tensors is None and not info.can_load()
    info.reset()


def half_loaded() -> tuple[Model, torch.Tensor]:
    """Returns a model into which one of two tensors was loaded, and the memory that the engine reads."""
    model = Model()
    live = model.layer.weight.data
    initialize_layerwise_reload(model)
    model.load_weights([("weight", torch.ones(2))])
    return model, live


def test_a_reload_that_broke_off_would_mix_with_the_next() -> None:
    model, _ = half_loaded()
    assert model.layer.weight.is_meta  # the engine has no weights in between
    initialize_layerwise_reload(model)
    model.load_weights([("bias", torch.full((2,), 3.0))])
    finalize_layerwise_reload(model, None)
    assert model.layer.weight.tolist() == [1, 1]  # of the publication before


def test_a_reload_that_is_undone_does_not() -> None:
    model, live = half_loaded()
    worker.abort_reload(model)
    assert model.layer.weight.data_ptr() == live.data_ptr() and model.layer.weight.tolist() == [0, 0]
    worker.reload_weights(model, None, [("weight", torch.full((2,), 2.0)), ("bias", torch.full((2,), 3.0))])
    assert model.layer.weight.data_ptr() == live.data_ptr() and live.tolist() == [2, 2]


def test_a_reload_reads_the_names_of_weight_loaders() -> None:
    """Partial functions have none. If no error is raised, drop `_name_partial_loaders`."""

    def doubled(param: nn.Parameter, loaded: torch.Tensor, factor: int) -> None:
        param.data.copy_(factor * loaded)

    models = [Model(), Model()]
    for model in models:
        for parameter in model.parameters():
            vars(parameter)["weight_loader"] = functools.partial(doubled, factor=2)
        record_metadata_for_reloading(model)
    with pytest.raises(AttributeError, match="__name__"):
        initialize_layerwise_reload(models[0])
    worker.reload_weights(models[1], None, [("weight", torch.ones(2)), ("bias", torch.ones(2))])
    assert models[1].layer.weight.tolist() == [2, 2]


@pytest.mark.parametrize("is_redirected", [False, True])
def test_a_reload_loses_copies_past_the_weight_loaders(is_redirected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing is lost any more, drop `_DirectCopies`."""

    class GptOssForCausalLM(Model):
        def load_weights(self, weights: Any) -> None:
            self.layer.weight.copy_(dict(weights)["weight"])

    copied = {"GptOssForCausalLM": ("weight",)} if is_redirected else {}
    monkeypatch.setattr(worker, "_COPIED_DIRECTLY", copied)
    model = GptOssForCausalLM()
    live = model.layer.weight.data
    for value in (2.0, 3.0):
        with torch.no_grad():
            worker.reload_weights(model, None, [("weight", torch.full((2,), value))])
        assert live.tolist() == [value if is_redirected else 0.0] * 2
        assert model.layer.weight.data_ptr() == live.data_ptr()


def test_plain_layers_have_the_names_that_are_looked_for() -> None:
    methods = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
    assert tuple(method.__name__ for method in methods) == worker._PLAIN_METHODS
    assert (Attention.__name__,) == worker._PLAIN_ATTENTION
    assert callable(Attention.process_weights_after_loading)


def test_layers_with_adapters_keep_their_base_layer() -> None:
    assert issubclass(ColumnParallelLinearWithLoRA, BaseLayerWithLoRA)
    assert "self.base_layer" in inspect.getsource(ColumnParallelLinearWithLoRA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA builds of vLLM do not pack experts for the CPU")
def test_on_cpu_experts_are_packed_only_before_they_have_a_kernel() -> None:
    source = inspect.getsource(UnquantizedFusedMoEMethod)
    packing = source.split("if not is_weight_update:", 1)[1].split("\n    def ", 1)[0]
    assert "is_weight_update = self.moe_kernel is not None" in source
    assert "fused_experts.process_weights_after_loading(" in packing


def test_on_cpu_a_layer_keeps_a_packed_copy_of_its_weight() -> None:
    assert "layer.cpu_linear = " in inspect.getsource(layer_utils.dispatch_cpu_unquantized_gemm)


# ---- routed experts


def test_this_vllm_returns_routes_on_cpu_through_the_hook_only() -> None:
    eager = {"enforce_eager": True, "additional_config": {"mine": 1}}
    hooked = recorded.returning_experts(eager, is_gpu=False)
    assert hooked is not None and hooked["additional_config"] == {"mine": 1, "lockstep_experts": True}
    assert eager["additional_config"] == {"mine": 1}
    assert recorded.is_marked(SimpleNamespace(additional_config=hooked["additional_config"]), recorded.EXPERTS)
    assert not recorded.is_marked(SimpleNamespace(additional_config={}), recorded.EXPERTS)
    for refused in (
        {},
        {"enforce_eager": True, "pipeline_parallel_size": 2},
        {"enforce_eager": True, "data_parallel_size": 2},
    ):
        assert recorded.returning_experts(refused, is_gpu=False) is None


def test_vllms_own_routes_are_asked_for_with_an_argument_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "enable_return_routed_experts" in {field.name for field in fields(AsyncEngineArgs)}
    assert "VLLM_MSGPACK_ZERO_COPY_THRESHOLD" in vllm.envs.environment_variables
    monkeypatch.setattr(recorded, "require_version", lambda _: "0.26.0")
    assert recorded.returning_experts({}, is_gpu=True) == {"enable_return_routed_experts": True}
    assert recorded.returning_experts({"enforce_eager": True}, is_gpu=False) is None
    monkeypatch.setattr(recorded, "require_version", lambda _: "0.32.0")
    assert recorded.returning_experts({}, is_gpu=True) is None


def test_vllms_recorder_is_called_with_a_layer_and_experts() -> None:
    assert names(routed_experts_capturer.bind_routed_experts_capturer) == ["model", "capturer"]
    theirs, ours = routed_experts_capturer.RoutedExpertsCapturer.capture, recorded._ExpertRecorder.capture
    assert names(theirs)[1:] == names(ours)[1:]
    assert "partial(capturer.capture, module.layer_id)" in inspect.getsource(routed_experts_capturer)


def test_a_scheduler_frees_the_slots_of_a_request_here_only() -> None:
    assert "self._free_request(request)" in inspect.getsource(Scheduler.update_from_output)
    assert names(Scheduler._free_request)[:2] == ["self", "request"]
    assert names(KVCacheManager.get_block_ids) == ["self", "request_id"]
    assert "routed_experts" in {field.name for field in msgspec.structs.fields(EngineCoreOutput)}


def test_experts_are_written_to_the_slots_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = np.full((8, 2, 2), 9, np.uint8)
    mapping = {"layers.0": torch.tensor([5, 2, -1, 0])}
    monkeypatch.setattr(recorded, "get_forward_context", lambda: SimpleNamespace(slot_mapping=mapping))
    recorded._ExpertRecorder(slots).capture(1, torch.tensor([[1, 2], [3, 0], [7, 7]]))
    assert slots[5, 1].tolist() == [1, 2] and slots[2, 1].tolist() == [3, 0]
    assert (slots != 9).sum() == 4
    mapping.clear()
    recorded._ExpertRecorder(slots).capture(1, torch.tensor([[1, 2]]))
    assert (slots != 9).sum() == 4
