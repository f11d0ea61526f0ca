"""Measures how much routing replay (R3) changes the difference between engine and trainer, on one GPU or, with --tiny,
on CPU.

`python -m benchmarks.routing NAME SHAPE [--tiny] [--prompts 16] [--samples 8] [--tokens 512]` samples with vLLM in a
process that then ends, and computes the same tokens with the FSDP backend: with the engine's experts, and with those
that the trainer's own routers choose. Both compute in bfloat16. Saves |engine - trainer| of the log-probabilities, and
the share of the engine's experts that the trainer chooses too, in results/NAME.json. SHAPE is one of
benchmarks.megatron_model with experts, such as qwen3-a3b-4-layers; its weights are random.
"""

import argparse
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from benchmarks.random_model import add_options, make_random_model
from benchmarks.report import keep
from services.common import batches
from services.common.config.trainer import TrainerConfig
from services.common.routed_experts import RoutedExpertsShape, routed_experts_shape
from services.trainer.backend import Role
from services.trainer.ranks.worker import Worker
from services.trainer.samples import forward_parts

_SEED = 0
_UNCOMPILED = {"fsdp": {"torch_compile": False}}  # as the engine's, below: it would take minutes


def main() -> None:
    """Samples, computes and saves the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing")
    parser.add_argument("name")
    parser.add_argument("shape")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model, path = make_random_model(Path(directory), options.shape, options), Path(directory) / "samples.arrow"
        context = multiprocessing.get_context("spawn")  # its memory is free again when it ends
        engine = context.Process(target=_sample, args=(model, path, options))
        engine.start()
        engine.join()
        if engine.exitcode:
            sys.exit("the engine failed, see above")
        samples = batches.decode([path.read_bytes()], schema=batches.SAMPLE_SCHEMA)
        measured = _compare(model, samples)
    workload = f"{options.prompts} prompts x {options.samples} samples x {options.tokens} tokens"
    settings = {"shape": options.shape, "tiny": options.tiny, "workload": workload}
    keep(options.name, measured, libraries=("torch", "vllm", "transformers"), **settings)


def _sample(model: Path, path: Path, options: argparse.Namespace) -> None:
    """Writes samples with their routed experts to `path`. Runs in a process of its own."""
    from lockstep.types.v1.types_pb2 import SamplingParams
    from vllm import LLM
    from vllm.inputs import TokensPrompt

    from services.common.config.rollout import RolloutConfig
    from services.rollout.__main__ import _configure_vllm
    from services.rollout.arguments import engine_arguments
    from services.rollout.compat.recorded import returning_experts
    from services.rollout.sampling import engine_sampling

    _configure_vllm()
    shape, longest = _shape(model), 2 * options.tokens
    # Compiling would take minutes for the same experts.
    config = RolloutConfig(max_model_len=longest, dtype="bfloat16", engine={"enforce_eager": True})
    made = engine_arguments(config, str(model), _SEED) | {"load_format": "auto"}
    arguments = returning_experts(made, is_gpu=torch.cuda.is_available())
    if arguments is None:
        sys.exit("this vLLM returns no routed experts on this device (services/rollout/compat/recorded.py)")
    llm = LLM(**arguments)
    llm.collective_rpc("lockstep_record_experts")
    random = np.random.default_rng(_SEED)
    vocab = llm.llm_engine.model_config.get_vocab_size()
    prompts = random.integers(0, vocab, (options.prompts, options.tokens // 4)).tolist()
    sampling = SamplingParams(temperature=1.0, max_tokens=options.tokens)
    asked = [(group, sample) for group in range(options.prompts) for sample in range(options.samples)]
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompts[group]) for group, _ in asked],
        [engine_sampling(sampling, seed) for seed in range(len(asked))],
        use_tqdm=False,
    )
    rows = [_row(*place, output, shape) for place, output in zip(asked, outputs, strict=True)]
    table = pa.Table.from_pylist(rows, schema=batches.SAMPLE_SCHEMA)
    path.write_bytes(b"".join(batches.encode(table, frame_bytes=1 << 40)))


def _row(group: int, sample: int, output: Any, shape: RoutedExpertsShape) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "prompt_id": str(group),
        "group": group,
        "sample": sample,
        "prompt_tokens": output.prompt_token_ids,
        "tokens": list(completion.token_ids),
        "logprobs": list(completion.logprobs.logprobs),
        "reward": 0.0,
        "components": [],
        "finish_reason": "length",
        "policy_version": 0,
        "policy_digest": "",
        "scorer": "none",
        "seed": 0,
        "routed_experts": shape.encode(completion.routed_experts),
    }


def open_policy(worker: Worker, model: Path, max_tokens: int, **settings: object) -> TrainerConfig:
    """Opens a policy that computes in bfloat16 on the only rank, and returns its config with these other settings."""
    content = {"compute_dtype": "bfloat16", "max_tokens_per_microbatch": max_tokens, **_UNCOMPILED, **settings}
    config = TrainerConfig.model_validate(content)
    worker.open(
        role=Role.POLICY,
        config_json=config.model_dump_json(),
        model_path=str(model),
        checkpoint_path="",
        seed=_SEED,
        bucket_bytes=512 << 20,
    )
    return config


def logprob_gaps(worker: Worker, config: TrainerConfig, samples: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Returns |trainer - engine| of every token's log-probability, float64 [N], and the order of the computed rows."""
    (part,), order = forward_parts(samples, config, 1)
    answer = worker.forward(role=Role.POLICY, **part.body, frames=part.frames, temperature=1.0)
    logprobs = np.concatenate(batches.decode(answer.frames)["logprobs"].take(pa.array(order)).to_pylist())
    return np.abs(logprobs.astype(np.float64) - np.concatenate(samples["logprobs"].to_pylist())), order


def _compare(model: Path, samples: pa.Table) -> dict[str, list[float]]:
    """Returns each token's gap and each sample's share of equal experts, with and without replay."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    worker, longest = Worker(dist.HashStore(), 0, 1, device), max(map(len, samples["tokens"])) * 2
    measured: dict[str, list[float]] = {}
    for mode in ("on", "off"):
        config = open_policy(worker, model, longest, moe={"router_replay": mode})
        chosen = _observe(worker)
        gaps, order = logprob_gaps(worker, config, samples)
        routed_experts = [samples["routed_experts"][row].as_buffer() for row in np.argsort(order)]
        measured |= {
            f"logprob difference mean, replay {mode} [nats]": [float(gaps.mean())],
            f"logprob diff max, replay {mode} [nats]": [float(gaps.max())],
            f"own experts that are the engine's, replay {mode}": [_agreement(chosen, routed_experts, _shape(model))],
        }
    worker.close()
    return measured


def _observe(worker: Worker) -> list[list[torch.Tensor]]:
    """Returns lists that get, for each layer, the experts that its router chooses by itself in each pass."""
    from services.trainer.compat.transformers import routers, set_choice

    backend: Any = worker._backends[Role.POLICY]
    found = routers(backend._model.causal_lm)
    chosen: list[list[torch.Tensor]] = [[] for _ in found]
    for router, seen in zip(found, chosen, strict=True):

        def note(own_RK: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.append(own_RK.cpu())
            return own_RK

        set_choice(router, note)
    return chosen


def _agreement(chosen: list[list[torch.Tensor]], routed_experts: list[pa.Buffer], shape: RoutedExpertsShape) -> float:
    """Returns the share of the engine's experts that the routers choose; `routed_experts` are in the order of the
    passes."""
    engine_TLK = torch.from_numpy(np.concatenate([shape.decode(row) for row in routed_experts]).astype(np.int64))
    own_TLK = torch.stack([torch.cat(seen) for seen in chosen], 1)
    return float((engine_TLK[..., :, None] == own_TLK[..., None, :]).any(-1).double().mean())


def _shape(model: Path) -> RoutedExpertsShape:
    shape = routed_experts_shape((model / "config.json").read_bytes())
    assert shape is not None, "all layers of the model must have experts"
    return shape


if __name__ == "__main__":
    main()
