"""Tests the internals of vLLM that the rollout service uses, and that each patch is still needed. Starts no engine."""

import asyncio
import inspect
import json
import multiprocessing
import os
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
from vllm import SamplingParams
from vllm.config import ModelConfig, ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.device_allocator import AllocationData, cumem
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.fused_moe import routed_experts_capturer
from vllm.utils.system_utils import get_mp_context
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
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
from services.rollout.__main__ import _configure_vllm
from services.rollout.compat import client, recorded, worker
from services.rollout.compat.client import abort_samples, forbid, stop_reading
from services.rollout.compat.patches import add_one_by_one
from services.rollout.compat.scheduler import kind_of
from services.rollout.compat.worker import rank_of
from services.rollout.receiver import WeightReceiver

BAD_WORD_LIMITS = {"NUM_BAD_WORDS": MAX_BAD_WORDS, "BAD_WORDS_TOTAL_TOKENS": MAX_BAD_WORD_TOKENS}
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


# ---- client: the fork server


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
    assert find_spec(client.CPU_WORKER) is not None


# ---- client: AsyncLLM


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
    assert {"enable_return_routed_experts", "moe_backend"} <= {field.name for field in fields(AsyncEngineArgs)}
    assert "VLLM_MSGPACK_ZERO_COPY_THRESHOLD" in vllm.envs.environment_variables
    with monkeypatch.context() as patch:  # set before engines are forked, which see no later variable
        patch.setattr(os, "environ", environ := dict[str, str]())
        _configure_vllm()
    assert environ["VLLM_MSGPACK_ZERO_COPY_THRESHOLD"] == str(1 << 40)
    monkeypatch.setattr(recorded, "require_version", lambda _: "0.26.0")
    # Triton's kernels do not route, as others do on Blackwell, which vLLM would choose there and get no experts from.
    asked = {"moe_backend": "triton", "enable_return_routed_experts": True}
    assert recorded.returning_experts({}, is_gpu=True) == asked
    assert recorded.returning_experts({"moe_backend": "auto"}, is_gpu=True) == asked | {"moe_backend": "auto"}
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
    mapping = {"layers.0": torch.tensor([1, 1, 1, 1]), "layers.1": torch.tensor([5, 2, -1, 0])}
    monkeypatch.setattr(recorded, "get_forward_context", lambda: SimpleNamespace(slot_mapping=mapping))
    recorded._ExpertRecorder(slots, "layers.1").capture(1, torch.tensor([[1, 2], [3, 0], [7, 7]]))
    assert slots[5, 1].tolist() == [1, 2] and slots[2, 1].tolist() == [3, 0]
    assert (slots != 9).sum() == 4
    mapping.clear()
    recorded._ExpertRecorder(slots, "layers.1").capture(1, torch.tensor([[1, 2]]))
    assert (slots != 9).sum() == 4


def test_where_vllm_keeps_what_follows_a_stop_string_it_is_dropped():
    class Keeps(BaseIncrementalDetokenizer):
        """Does what vLLM 0.26 does."""

        def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
            self.token_ids.extend(new_token_ids)
            self.output_text += "".join(map(self.decode_next, new_token_ids))
            return next((stop for stop in self.stop if stop in self.output_text), None)

        def decode_next(self, next_token_id: int) -> str:
            return chr(next_token_id)

    def texts(stop: list[str]) -> tuple[str | None, str, list[int]]:
        params = SamplingParams(stop=stop, include_stop_str_in_output=True)
        detokenizer = Keeps(SimpleNamespace(request_id="1", sampling_params=params, prompt_token_ids=[]))
        detokenizer.update(list(b"one "), False)
        return detokenizer.update(list(b"</s>, two"), True), detokenizer.output_text, detokenizer.token_ids

    assert texts(["</s>"]) == ("</s>", "one </s>, two", list(b"one </s>, two"))
    add_one_by_one(Keeps)
    add_one_by_one(Keeps)
    assert texts(["</s>"]) == ("</s>", "one </s>", list(b"one </s>"))
    assert texts(["</t>"]) == (None, "one </s>, two", list(b"one </s>, two"))
    assert texts([]) == (None, "one </s>, two", list(b"one </s>, two"))
