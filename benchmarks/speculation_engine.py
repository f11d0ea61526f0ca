"""Samples with one engine of the rollout service; `benchmarks.speculation` starts one without and one with speculation.

`python -m benchmarks.speculation_engine MODEL SETTINGS RESULT` reads the settings and writes the result, both JSON.

The model has a real shape. Its layers do all their computation, but add nothing to the hidden states. The next token
therefore depends on the last one only: with probability LIKELY at temperature 1 it is the next of a cycle of CYCLE
tokens, which is repetitive text, and at temperature 2 it is any token (but for one in 80 with the vocabulary of Qwen3,
and one in 6 with --tiny), which is random text. The number of drafted tokens that can be accepted is therefore known,
and a step is as fast as with that shape.
"""

import asyncio
import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from services.rollout.__main__ import _prepare

CYCLE, LIKELY = 4, 0.95
TEMPERATURES = {"repetitive": 1.0, "random": 2.0}


def make_model(directory: Path, shape: str, is_tiny: bool) -> None:
    """Writes the model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.megatron_layouts import MODELS, TINY

    kind, values = MODELS[shape]
    config = AutoConfig.for_model(kind, **(values | (TINY if is_tiny else {}) | {"tie_word_embeddings": False}))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        embeddings_VH = model.get_input_embeddings().weight
        last_VH = torch.nn.functional.rms_norm(embeddings_VH, embeddings_VH.shape[1:])
        model.lm_head.weight.zero_()
        model.lm_head.weight[successors(config.vocab_size)] = scale(config.hidden_size, config.vocab_size) * last_VH
    model.to(torch.bfloat16 if torch.cuda.is_available() else torch.float32).save_pretrained(directory)


def successors(vocab_size: int) -> Any:
    """Returns each token's next in its cycle, int64 [V]. A vocabulary is a multiple of CYCLE."""
    import torch

    tokens_V = torch.arange(vocab_size)
    return tokens_V - tokens_V % CYCLE + (tokens_V + 1) % CYCLE


def scale(hidden_size: int, vocab_size: int) -> float:
    """Returns the factor c that gives the successor the probability LIKELY.

    Its logit is c H. Those of others are normal with variance c² H, so the sum of their exponentials is about
    V exp(c² H / 2), and c solves c H - c² H / 2 = ln(V LIKELY / (1 - LIKELY)).
    """
    wanted = math.log(vocab_size * LIKELY / (1 - LIKELY)) / hidden_size
    return 1 - math.sqrt(1 - 2 * wanted)


async def measure(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of each batch, by text and number of samples."""
    from services.common.config.rollout import RolloutConfig
    from services.common.model_card import read_model_card
    from services.rollout.arguments import Needs
    from services.rollout.engine import Engine

    config = RolloutConfig.model_validate(
        settings["rollout"] | {"engine": settings["rollout"]["engine"] | {"load_format": "auto", "model": str(model)}}
    )
    engine = await Engine.start(config, read_model_card(model), 0, lambda: None, Needs())
    results: dict[str, Any] = {}
    try:
        await draw(engine, "repetitive", min(settings["concurrency"]), settings, repeat=-1)  # warms up
        batches = [(text, num_samples) for text in TEMPERATURES for num_samples in settings["concurrency"]]
        for repeat in range(settings["repeats"]):
            for text, num_samples in batches:
                numbers = await draw(engine, text, num_samples, settings, repeat)
                results.setdefault(f"{text}, {num_samples} at once", []).append(numbers)
    finally:
        await engine.close()
    return results


async def draw(engine: Any, text: str, num_samples: int, settings: dict[str, Any], repeat: int) -> dict[str, float]:
    """Samples one batch, all at once, and returns its numbers."""
    import numpy as np
    from lockstep.types.v1.types_pb2 import SamplingParams

    sampling = SamplingParams(temperature=TEMPERATURES[text], max_tokens=settings["max_tokens"])
    vocab_size, random = settings["vocab_size"], np.random.default_rng([num_samples, repeat + 1])
    prompts = random.integers(0, vocab_size, (num_samples, settings["prompt_tokens"])).tolist()
    # Different in each batch, so that batches are independent.
    seeds = random.integers(0, 1 << 31, num_samples).tolist()
    begin = time.perf_counter()
    samples = await asyncio.gather(
        *(engine.sample(prompt, seed, sampling) for seed, prompt in zip(seeds, prompts, strict=True))
    )
    duration_s = time.perf_counter() - begin
    tokens = np.array(
        [[prompt[-1], *sample.completion.tokens] for prompt, sample in zip(prompts, samples, strict=True)]
    )
    logprobs = np.array([sample.completion.logprobs for sample in samples])
    followed = tokens[:, 1:] == successors(vocab_size).numpy()[tokens[:, :-1]]
    drafts = {
        name: sum(getattr(sample.drafts, name) for sample in samples)
        for name in ("num_drafts", "num_drafted", "num_accepted", "seconds")
    }
    return {
        "tokens/s": logprobs.size / duration_s,
        "successors": float(followed.mean()),
        "mean log-probability": float(logprobs.mean()),
        "log-probability of successors, mean": float(logprobs[followed].mean()) if followed.any() else 0.0,
        **drafts,
    }


def main() -> None:
    """Makes the model if it is not there, and measures."""
    model, settings, result = map(Path, sys.argv[1:])
    read = json.loads(settings.read_text())
    with contextlib.ExitStack() as files:
        _prepare(files)
        if not (model / "config.json").exists():
            make_model(model, read["shape"], read["is_tiny"])
        read["vocab_size"] = json.loads((model / "config.json").read_text())["vocab_size"]
        result.write_text(json.dumps(asyncio.run(measure(model, read))))


if __name__ == "__main__":
    main()
