"""`torchrun -m benchmarks.megatron_rank DIRECTORY`: all layouts of this number of ranks, one after the other."""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.megatron_layouts import CP, PP, TP, Layout, layouts, samples
from services.common import batch as batches
from services.common.config.trainer import TrainerConfig
from services.trainer.megatron import backend
from services.trainer.shards import forward_parts, train_parts
from services.trainer.worker import Worker


def run_rank(directory: Path) -> None:
    """All layouts of this world size, one after the other, in one process per GPU."""
    store, rank, world = next(dist.rendezvous("env://"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    worker = Worker(store, rank, world, device)
    for name in json.loads((directory / "layouts.json").read_text()):
        layout = dict(layouts())[name]
        if layout.world == world:
            result = measure(worker, rank, layout, directory)
            if rank == 0:
                (directory / f"{name}.json").write_text(json.dumps(result))
    worker.close()


def measure(worker: Worker, rank: int, layout: Layout, directory: Path) -> dict[str, Any]:
    """Log-probabilities, two updates, seconds and memory of one layout."""
    path = directory / layout.model
    if not list(path.glob("*.safetensors")):
        backend.load_checkpoint_weights = lambda *args: None  # Megatron's own random weights
    config = _config(layout)
    begin = time.perf_counter()
    answer = worker.open(
        config_json=config.model_dump_json(), model_path=str(path), checkpoint_path="", seed=0, bucket_bytes=512 << 20
    )
    result: dict[str, Any] = {"open [s]": time.perf_counter() - begin, "idle after open [GB]": _allocated()}
    sizes = [layout.megatron.get(key, 1) for key in (TP, PP, CP)]
    data_rank, data_ranks = answer.body["data_ranks"]["policy"], layout.world // int(np.prod(sizes))
    table = samples(json.loads((path / "config.json").read_text())["vocab_size"])
    parts, order = forward_parts(table, config, data_ranks)
    part = parts[data_rank]
    answer = worker.forward(role="policy", **part.body, frames=part.frames, temperature=1.0)
    gathered: list[Any] = [None] * layout.world
    dist.all_gather_object(gathered, (data_rank, batches.decode(answer.frames)["logprobs"].to_pylist()))
    flat = list(itertools.chain.from_iterable(dict(gathered)[r] for r in range(data_ranks)))
    result["logprobs"] = [flat[index] for index in order]
    part = train_parts(table, config, data_ranks)[data_rank]
    num_tokens = sum(len(row) for name in ("prompt_tokens", "tokens") for row in table[name])
    for version in (0, 1):
        begin = time.perf_counter()
        body = worker.train(**part.body, frames=part.frames, temperature=1.0, version=version).body
        seconds = time.perf_counter() - begin
        result.setdefault("grad_norm", body["metrics"]["grad_norm"])
        result.setdefault("loss", body["metrics"]["loss"])
    result |= {"second update [s]": seconds, "tokens/s/GPU": num_tokens / seconds / layout.world}
    result["idle after update [GB]"], result["peak [GB]"] = _allocated(), _peak()
    return result


def _config(layout: Layout) -> TrainerConfig:
    settings = {
        "strategy": "megatron",
        "num_ranks": layout.world,
        "max_tokens_per_microbatch": 2048,
        "max_logprob_gap": 1e9,
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
    run_rank(Path(sys.argv[1]))
