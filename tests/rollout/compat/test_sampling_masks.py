"""Tests that sampling masks are collected where the engine samples, and arrive with a sample's last token.

An engine that cannot collect them is refused.
"""

import inspect
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

from services.common.batches import encode_sampling_masks
from services.common.errors import InternalError, InvalidInput
from services.rollout.compat import recorded
from tests.support import raises


class PlayedScheduler:
    def __init__(self) -> None: ...

    def update_from_output(self, said: dict[int, EngineCoreOutputs], _: Any) -> dict[int, EngineCoreOutputs]:
        return said

    def finish_requests(self, request_ids: list[str], _: None) -> list[SimpleNamespace]:
        return [SimpleNamespace(request_id=name) for name in request_ids]


class Returning(recorded.ReturnsMasks, PlayedScheduler):
    def step(self, *outputs: EngineCoreOutput, **sets: list[int]) -> None:
        said = SimpleNamespace(**{recorded.MASKS: {name: np.array(one) for name, one in sets.items()}} if sets else {})
        self.update_from_output({0: EngineCoreOutputs(outputs=list(outputs))}, said)


def last(name: str, **more: Any) -> EngineCoreOutput:
    return EngineCoreOutput(name, [4], finish_reason=FinishReason.LENGTH, **more)


def arrived(output: EngineCoreOutput, tokens: list[int]) -> bytes:
    completions = [SimpleNamespace(token_ids=tokens)]
    return recorded.masks_of(SimpleNamespace(kv_transfer_params=output.kv_transfer_params, outputs=completions))  # type: ignore[arg-type]


def test_a_samples_last_output_has_its_kept_sets() -> None:
    played, end, other = Returning(), last("a"), last("b")
    played.step(EngineCoreOutput("a", [3]), EngineCoreOutput("b", [3]), a=[3, 5])
    played.step(EngineCoreOutput("a", []), a=[9])  # part of a prompt
    played.step(end, other, a=[4])
    assert arrived(end, [3, 4]) == encode_sampling_masks([[3, 5], [4]])
    assert other.kv_transfer_params is None  # it has not asked for them
    played.step(EngineCoreOutput("c", [3]), c=[3])
    played.finish_requests(["c"], None)
    assert not played._masks


def test_masks_of_vllm_itself_are_used() -> None:
    played, end = Returning(), last("a", new_sampling_mask=SamplingMaskLists(np.array([4, 6])))
    played.step(EngineCoreOutput("a", [3], new_sampling_mask=SamplingMaskLists(np.array([3]))))
    played.step(end)
    assert arrived(end, [3, 4]) == encode_sampling_masks([[3], [4, 6]]) and end.new_sampling_mask is None


@pytest.mark.parametrize("asking", [[True, True, True], [False, True, True], [False, True, False]])
def test_the_hook_reads_the_sets_of_those_that_ask(asking: list[bool]) -> None:
    sets = {"a": [0, 4], "b": [1], "c": [0, 2, 3]}
    logprobs_BV = torch.full((4, 5), -torch.inf)  # the last row is of no request
    for row, tokens in enumerate(sets.values()):
        logprobs_BV[row, tokens] = -1.0
    ask = {
        name: SimpleNamespace(extra_args=recorded.ASKS if is_one else None)
        for name, is_one in zip(sets, asking, strict=True)
    }
    runner = SimpleNamespace(
        sampler=SimpleNamespace(sample=lambda: (None, logprobs_BV)),
        sample_tokens=lambda: (runner.sampler.sample(), SimpleNamespace())[1],
        input_batch=SimpleNamespace(req_ids=list(sets)),
        requests={name: SimpleNamespace(sampling_params=one) for name, one in ask.items()},
    )
    recorded._MaskRecorder(runner)
    output = runner.sample_tokens()
    masks = {name: one.tolist() for name, one in getattr(output, recorded.MASKS).items()}
    assert masks == {name: sets[name] for name, is_one in zip(sets, asking, strict=True) if is_one}


@pytest.mark.parametrize(("tokens", "message"), [([4, 4], "no sampling masks"), ([5], "without 1 of 1 sampled tokens")])
def test_sets_of_other_tokens_are_refused(tokens: list[int], message: str) -> None:
    played, end = Returning(), last("a")
    played.step(end, a=[4, 6])
    with pytest.raises(InternalError, match=message):
        arrived(end, tokens)


@pytest.mark.parametrize(
    ("version", "is_gpu", "arguments", "answer"),
    [
        ("0.32.0", False, {}, False),
        ("0.26.0", True, {}, False),
        ("0.32.0", True, {}, True),
        ("0.31.0", True, {}, None),
        ("0.26.0", False, {}, None),
        ("0.32.0", False, {"pipeline_parallel_size": 2}, None),
    ],
)
def test_an_engine_that_cannot_is_refused(
    version: str, is_gpu: bool, arguments: dict[str, Any], answer: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests who returns sampling masks: `answer` is True if vLLM does, False if our hook does, None if nobody does."""
    monkeypatch.setattr(recorded, "require_version", lambda _: Version(version))
    engine_arguments = {"additional_config": {"x": 1}} | arguments
    if answer is None:
        with raises(InvalidInput, field="rollout.sampling.top_k"):
            recorded.returning_masks(engine_arguments, is_gpu=is_gpu)
        return
    made = recorded.returning_masks(engine_arguments, is_gpu=is_gpu)
    assert made["additional_config"] == {"x": 1, recorded.MASKS: True}
    assert made.get("return_sampling_mask", False) is answer
    assert recorded.is_marked(SimpleNamespace(additional_config=made["additional_config"]), recorded.MASKS)  # type: ignore[arg-type]


def test_vllm_has_what_the_hook_uses() -> None:
    assert "self.sample(logits, sampling_metadata)" in inspect.getsource(Sampler.forward)
    assert "self.sampler(" in inspect.getsource(GPUModelRunner._sample)
    assert "self._sample(" in inspect.getsource(GPUModelRunner.sample_tokens)
    assert "self._model_runner_output = model_runner_output" in inspect.getsource(AsyncGPUModelRunnerOutput.__init__)
    assert hasattr(InputBatch, "req_ids") and hasattr(EngineCoreOutput, "kv_transfer_params")
    assert "return_sampling_mask" in {field.name for field in fields(AsyncEngineArgs)}
