"""Makes a model with random weights, and its reference log-probabilities, for `benchmarks.megatron`.

Run `python -m benchmarks.megatron_model DIRECTORY MODEL [tiny] [weights-only]`.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig

from benchmarks.megatron_layouts import MODELS, TINY, samples
from services.trainer.structure import make_model as make_causal_model
from tests.trainer.zoo import PUBLISHED


def make_model(directory: Path, name: str, is_tiny: bool, is_for_weights: bool) -> None:
    """Writes DIRECTORY/MODEL and, without `weights-only`, DIRECTORY/MODEL.logprobs.json."""
    kind, shape = MODELS[name]
    config = AutoConfig.for_model(kind, **(shape | (TINY if is_tiny else {})))
    path = directory / name
    if name == "qwen3-30b-a3b" and not is_for_weights:  # too large for transformers on one GPU
        config.save_pretrained(path)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = make_causal_model(config, dtype=dtype)
    model.save_pretrained(path)
    add_published_keys(path, kind)
    if is_for_weights:
        return
    rows = []
    for row in samples(config.vocab_size).to_pylist():
        ids = torch.tensor([row["prompt_tokens"] + row["tokens"]], device=device)
        with torch.no_grad():
            logprobs = model(ids[:, :-1]).logits[0].float().log_softmax(-1)
        start = len(row["prompt_tokens"]) - 1
        rows.append(logprobs.gather(1, ids[0, 1:, None])[start:, 0].cpu().tolist())
    (directory / f"{name}.logprobs.json").write_text(json.dumps(rows))


def add_published_keys(directory: Path, kind: str) -> None:
    """Adds to config.json what vLLM reads in published models of the type and transformers does not write."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | PUBLISHED.get(kind, {})))


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), sys.argv[2], "tiny" in sys.argv[3:], "weights-only" in sys.argv[3:])
