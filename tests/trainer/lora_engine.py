"""Runs vLLM with a base model and adapters: `python -m tests.trainer.lora_engine OUT BASE ADAPTER...`.

OUT is the JSON file that it writes.
"""

import json
import sys
from pathlib import Path
from typing import Any

from services.rollout.__main__ import _configure_vllm

PROMPTS = ([2, 3, 4, 5], [7, 8, 9, 10, 11, 12], [20, 21])


def main(out: Path, base: str, adapters: list[str]) -> None:
    """Writes greedy tokens and their log-probabilities for each prompt, of each adapter and then of the base alone."""
    _configure_vllm()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from services.common.config.rollout import RolloutConfig
    from services.rollout.arguments import engine_arguments

    engine = {"load_format": "auto", "enable_lora": True, "max_lora_rank": 8}
    config = RolloutConfig(max_model_len=128, max_samples=8, engine=engine)
    llm = LLM(**engine_arguments(config, base, seed=0))
    sampling = SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    requests = [LoRARequest(path, index, path) for index, path in enumerate(adapters, start=1)]
    answers = []
    for request in (*requests, None):
        outputs = llm.generate(prompts, sampling, lora_request=request, use_tqdm=False)
        answers.append([_completion(output.outputs[0]) for output in outputs])
    out.write_text(json.dumps(answers))


def _completion(output: Any) -> dict[str, list]:
    steps = zip(output.logprobs, output.token_ids, strict=True)
    return {"tokens": list(output.token_ids), "logprobs": [step[token].logprob for step, token in steps]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
