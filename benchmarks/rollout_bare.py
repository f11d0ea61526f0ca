"""Runs vLLM's LLM alone, with the engine arguments of the rollout service; `benchmarks.rollout` starts it.

`python -m benchmarks.rollout_bare PID` ends when the process PID ends. The first line of JSON on stdin opens the
engine, and each further line is a batch; each line is answered by a line on stdout.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from services.common.config.load import parse_json
from services.common.config.rollout import RolloutConfig
from services.common.process import exit_with
from services.rollout.__main__ import _configure_vllm


class Bare:
    """Runs one LLM and records when each of its requests finished."""

    def __init__(self, config: RolloutConfig, model: str, seed: int):
        from vllm import LLM

        from services.rollout.arguments import engine_arguments

        # The same weights as the service's, because the speed of a GPU's matrix products also depends on the values.
        vllm_s_own: dict[str, Any] = {
            "load_format": "auto",
            "scheduler_cls": "benchmarks.rollout_lengths.bare_scheduler",
        }
        self._arguments = engine_arguments(config, model, seed) | vllm_s_own
        del self._arguments["worker_extension_cls"]
        self._llm = LLM(**self._arguments)
        self._finished_s: dict[str, float] = {}
        self._step, self._llm.llm_engine.step = self._llm.llm_engine.step, self._timed_step

    def describe(self) -> dict[str, Any]:
        """Returns the settings that vLLM derived from the arguments, which differ between LLM and AsyncLLM."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        own = self._llm.llm_engine.vllm_config
        service = AsyncEngineArgs(**self._arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
        return {
            "bare max_num_batched_tokens": own.scheduler_config.max_num_batched_tokens,
            "service max_num_batched_tokens": service.scheduler_config.max_num_batched_tokens,
            "async_scheduling": own.scheduler_config.async_scheduling,
            "largest CUDA graph": own.compilation_config.max_cudagraph_capture_size,
        }

    def draw(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Samples all of `batch`: `requests` of (prompt tokens, seed), in order, with one `sampling` (as protobuf)."""
        from lockstep.types.v1.types_pb2 import SamplingParams
        from vllm.inputs import TokensPrompt

        from services.rollout.sampling import engine_sampling

        self._finished_s.clear()
        sampling = SamplingParams(**batch["sampling"])
        begin = time.perf_counter()
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=tokens) for tokens, _ in batch["requests"]],
            [engine_sampling(sampling, seed) for _, seed in batch["requests"]],
            use_tqdm=False,
        )
        return {
            "duration_s": time.perf_counter() - begin,
            "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
            "finished_s": [self._finished_s[output.request_id] - begin for output in outputs],
        }

    def _timed_step(self) -> list[Any]:
        outputs = self._step()
        now = time.perf_counter()
        self._finished_s.update({output.request_id: now for output in outputs if output.finished})
        return outputs


def main() -> None:
    """Serves requests; answers go to the original stdout, and everything that vLLM prints to stderr."""
    exit_with(int(sys.argv[1]))
    _configure_vllm()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        opening = json.loads(sys.stdin.readline())
        bare = Bare(parse_json(RolloutConfig, opening["config_json"]), opening["model"], opening["seed"])
        _answer(answers, bare.describe())
        for line in sys.stdin:
            _answer(answers, bare.draw(json.loads(line)))


def _answer(answers: TextIO, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
