"""Runs all layouts of one model for this number of ranks: `torchrun -m benchmarks.megatron_rank DIRECTORY MODEL`."""

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from benchmarks.megatron_layouts import CP, PP, TP, Layout, layouts, samples
from benchmarks.updating import part_of, update
from services.common import batches
from services.common.config.trainer import TrainerConfig
from services.trainer.checkpoint.manifest import begin as begin_checkpoint
from services.trainer.megatron import backend
from services.trainer.ranks.worker import Worker
from services.trainer.samples import forward_parts


def run_rank(directory: Path, model: str) -> None:
    """Runs all layouts of one model for this world size, one after the other, with one process per GPU."""
    store, rank, world = next(rendezvous("env://"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    worker = Worker(store, rank, world, device)
    for name in json.loads((directory / "layouts.json").read_text()):
        layout = dict(layouts())[name]
        if layout.world == world and layout.model == model:
            result = measure(worker, rank, layout, directory)
            if rank == 0:
                (directory / f"{name}.json").write_text(json.dumps(result))
    worker.close()


def measure(worker: Worker, rank: int, layout: Layout, directory: Path) -> dict[str, Any]:
    """Measures one layout: log-probabilities, two updates, seconds and memory."""
    path = directory / layout.model
    if not list(path.glob("*.safetensors")):
        backend.load_checkpoint_weights = lambda *args: None  # keep Megatron's own random weights
    config = _config(layout)
    begin = time.perf_counter()
    checkpoint = directory / f"{layout.model}.checkpoint"
    answer = worker.open(
        role="policy",
        config_json=config.model_dump_json(),
        model_path=str(path),
        checkpoint_path=str(checkpoint) if layout.loads else "",
        seed=0,
        bucket_bytes=512 << 20,
    )
    result: dict[str, Any] = {"open [s]": time.perf_counter() - begin, "idle after open [GB]": _allocated()}
    sizes = [layout.megatron.get(key, 1) for key in (TP, PP, CP)]
    data_rank, data_ranks = answer.body["data_rank"], layout.world // int(np.prod(sizes))
    table = samples(json.loads((path / "config.json").read_text())["vocab_size"])
    result["logprobs"] = _logprobs(worker, config, table, data_rank, data_ranks)
    if layout.loads:
        return result
    part = part_of(table, config, data_ranks, data_rank)
    num_tokens = sum(len(row) for name in ("prompt_tokens", "tokens") for row in table[name])
    for version in (0, 1):
        begin = time.perf_counter()
        metrics = update(worker, part, version=version)
        seconds = time.perf_counter() - begin
        result.setdefault("grad_norm", metrics["grad_norm"])
        result.setdefault("loss", metrics["loss"])
    result |= {"second update [s]": seconds, "tokens/s/GPU": num_tokens / seconds / layout.world}
    result["idle after update [GB]"], result["peak [GB]"] = _allocated(), _peak()
    if layout.saves:
        result["logprobs saved"] = _logprobs(worker, config, table, data_rank, data_ranks)
        begin_checkpoint(checkpoint)
        worker.save(path=str(checkpoint), state={"version": 2, "last_batch_id": "", "last_metrics": {}})
    return result


def _logprobs(worker: Worker, config: TrainerConfig, table: pa.Table, data_rank: int, data_ranks: int) -> list[Any]:
    """Returns the log-probabilities of all samples, in their order."""
    parts, order = forward_parts(table, config, data_ranks)
    part = parts[data_rank]
    answer = worker.forward(role="policy", **part.body, frames=part.frames, temperature=1.0)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (data_rank, batches.decode(answer.frames)["logprobs"].to_pylist()))
    flat = list(itertools.chain.from_iterable(dict(gathered)[r] for r in range(data_ranks)))
    return [flat[index] for index in order]


def _config(layout: Layout) -> TrainerConfig:
    settings = {
        "strategy": "megatron",
        "num_ranks": layout.world,
        "max_tokens_per_microbatch": 2048,
        "max_logprob_diff": 1e9,
        "loss": {"entropy_coef": 0.1},
        "megatron": layout.megatron,
    }
    return TrainerConfig.model_validate(settings | layout.trainer)


def _allocated() -> float:
    return torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def _peak() -> float:
    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return peak


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2])
