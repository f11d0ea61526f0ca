"""Tests that samples are the same with vLLM's own schedulers, which send every token at once. Starts no engine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from services.common.config.rollout import RolloutConfig
from services.rollout.arguments import engine_arguments
from services.rollout.compat.scheduler import InChunks, kind_of, scheduler

NUM_BLOCKS, STOP, ABORTED = 1000, 7, "r3"


def made(of: Callable[..., Scheduler], config: VllmConfig) -> Scheduler:
    size = config.cache_config.block_size
    group = KVCacheGroupSpec(["layer"], FullAttentionSpec(size, num_kv_heads=1, head_size=32, dtype=torch.float32))
    return of(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [group]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
    )


def requests() -> Iterator[Request]:
    """Yields requests of many lengths; every third has no log-probabilities, and some end with a stop token."""
    for index, max_tokens in enumerate([1, 2, 31, 200, 32, 33, 34, 64, 65, 66, 80, 81]):
        logprobs = None if index % 3 == 1 else 0
        stops = [STOP] if index % 4 == 2 else []
        sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, stop_token_ids=stops)
        yield Request(f"r{index}", [5, 6, 7], sampling, None)


def computed(scheduled: SchedulerOutput, step: int, at_once: int) -> ModelRunnerOutput:
    """Returns made-up tokens of a step, up to `at_once` for each sample."""
    random, names = np.random.default_rng(step), list(scheduled.num_scheduled_tokens)
    counts = random.integers(1, at_once + 1, len(names))
    ids = random.integers(0, 60, (sum(counts), 1))
    lists = LogprobsLists(ids, random.normal(size=ids.shape).astype(np.float32), random.integers(1, 9, len(ids)))
    ends = np.cumsum(counts).tolist()
    if at_once > 1:
        lists = lists._replace(cu_num_generated_tokens=[0, *ends])
    sampled = [part[:, 0].tolist() for part in np.split(ids, ends[:-1])]
    return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, sampled, lists)


def play(played: Scheduler, at_once: int, *, is_delayed: bool) -> list[EngineCoreOutput]:
    """Returns all outputs. If delayed, a step is scheduled before the outputs of the last one are known."""
    for request in requests():
        played.add_request(request)
    outputs, pending = [], []
    for step in range(90):
        scheduled = played.schedule()
        pending.append((scheduled, computed(scheduled, step, at_once)))
        if step == 40:
            played.finish_requests([ABORTED], RequestStatus.FINISHED_ABORTED)
        while len(pending) > is_delayed:
            scheduled, said = pending.pop(0)
            lists = said.logprobs
            for answer in played.update_from_output(scheduled, said).values():
                outputs += answer.outputs
            assert said.logprobs is lists  # the runner's object is as it was
    assert not played.requests
    return outputs


def joined(outputs: list[EngineCoreOutput], name: str) -> dict[str, Any]:
    mine = [output for output in outputs if output.request_id == name]
    lists = [output.new_logprobs for output in mine if output.new_logprobs is not None]
    assert all(type(each) is LogprobsLists and each.cu_num_generated_tokens is None for each in lists)
    return {
        "tokens": [token for output in mine for token in output.new_token_ids],
        "logprobs": [np.concatenate(arrays).tolist() for arrays in list(zip(*lists, strict=True))[:3]],
        "ends": [(output.finish_reason, output.stop_reason) for output in mine if output.finish_reason is not None],
    }


@pytest.mark.usefixtures("inspects_here")
@pytest.mark.parametrize(("is_async", "at_once"), [(False, 1), (False, 3), (True, 1)])
def test_samples_are_those_of_vllms_own_scheduler(is_async: bool, at_once: int, model: Callable[[str], Path]) -> None:
    arguments = engine_arguments(RolloutConfig(max_model_len=256, max_samples=16), str(model("tied")), seed=0)
    config = AsyncEngineArgs(**arguments).create_engine_config()
    config.scheduler_config.async_scheduling = is_async  # vLLM turns it off on CPU
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    ours, vllms = made(scheduler, config), made(kind_of(config), config)
    assert isinstance(ours, InChunks) and isinstance(vllms, AsyncScheduler) == is_async
    sent, expected = (play(played, at_once, is_delayed=is_async) for played in (ours, vllms))
    assert len(sent) < len(expected) / 4
    for request in requests():
        mine, whole = (joined(outputs, request.request_id) for outputs in (sent, expected))
        if request.request_id == ABORTED:
            mine["tokens"] += whole["tokens"][len(mine["tokens"]) :]  # it never sends what it had collected
            assert mine["tokens"] == whole["tokens"] and not mine["ends"]
            continue
        assert mine == whole
        has_logprobs = request.sampling_params is not None and request.sampling_params.logprobs is not None
        assert bool(whole["logprobs"]) == has_logprobs and len(whole["ends"]) == 1
