"""Trains the models of the zoo on two ranks with strategy fsdp, and compares each with transformers on single samples.

`main` runs one rank; rank 0 writes what it measured, or the refusal, to DIRECTORY/<name>.json.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from services.common.batches import batch as batches
from services.common.errors import InvalidInput
from services.trainer.backend import Role
from services.trainer.checkpoint.agreement import gather_json
from services.trainer.samples import forward_parts
from services.trainer.structure import class_of, make_model
from tests.support import write_tokenizer
from tests.trainer import plain_grpo
from tests.trainer.fsdp_harness import TEMPERATURE, Harness, config, samples
from tests.trainer.harness_processes import start_harness
from tests.trainer.zoo import ZOO

SETTINGS: dict[str, Any] = {"max_tokens_per_microbatch": 64}
"""Several micro-batches on each rank, of several sequences."""


def zoo_config(name: str) -> PretrainedConfig:
    kind, settings = ZOO[name]
    return CONFIG_MAPPING[kind](**json.loads(json.dumps(settings)))  # some classes change what they are given


def make_zoo_model(name: str, directory: Path) -> Path:
    """Writes the model with a character tokenizer; returns `directory`."""
    torch.manual_seed(0)
    model = make_model(zoo_config(name), dtype=torch.float32)
    randomize(model)
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def randomize(model: PreTrainedModel) -> None:
    """Draws all weights, so that none hides a mistake in its place by being 0 or 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter += 0.2 * noise
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if "bias" in name:  # of routers
                buffer += 0.1 * torch.randn(buffer.shape, generator=generator)


def plain_gradients(directory: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Returns what transformers computes sample by sample: the log-probabilities, and the gradient of an update."""
    model = class_of(zoo_config(directory.name)).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    rows = samples().to_pylist()
    scored = [plain_grpo.score(model.eval(), row, TEMPERATURE) for row in rows]
    old = [logprobs.detach() for logprobs, _ in scored]
    columns = [plain_grpo.tensors(row) | {"old_logprobs": mine} for row, mine in zip(rows, old, strict=True)]
    batch = [(*one, held) for one, held in zip(scored, columns, strict=True)]
    plain_grpo.batch_loss(batch, config(SETTINGS).loss).backward()
    return old, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(harness: Harness, directory: Path) -> dict[str, Any]:
    """Returns the largest differences: of log-probabilities in nats, of gradients relative to their largest entry."""
    batch, name = samples(), directory.name
    harness.open(name, SETTINGS)
    parts, order = forward_parts(batch, config(SETTINGS), harness.world)
    body = parts[harness.rank]
    answer = harness.worker.forward(role=Role.POLICY, **body.body, frames=body.frames, temperature=TEMPERATURE)
    gradients, _ = harness.gradients_of(batch)
    got = _gathered(answer.frames, order)
    if harness.rank:
        return {}
    want, plain = plain_gradients(directory)
    logprob = max(float((torch.tensor(a) - b).abs().max()) for a, b in zip(got, want, strict=True))
    relative = {
        key: float((gradients[key] - grad).abs().max() / grad.abs().max().clamp_min(1e-6))
        for key, grad in plain.items()
    }
    worst = max(relative, key=relative.__getitem__)
    layout = harness.backend._model.layout.value
    return {"logprob": logprob, "gradient": relative[worst], "of": worst, "layout": layout}


def _gathered(frames: list[bytes], order: list[int]) -> list[list[float]]:
    """Returns the log-probabilities of all ranks in the batch's order."""
    rows = batches.decode(frames)["logprobs"].to_pylist()
    flat = [row for rank in gather_json(rows, torch.device("cpu")) for row in rank]
    return [flat[index] for index in order]


def played(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Runs the ranks on the models; returns what `compare` found, or the refusal, by the model's name."""
    ranks = [start_harness("zoo_harness", rank, 2, directory, names) for rank in range(2)]
    try:
        for rank in ranks:
            rank.join(1800)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in names}


def main(rank: int, world: int, directory: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world)
    harness = Harness(store, rank, world, directory / "models")
    for name in names:
        if rank == 0:
            make_zoo_model(name, directory / "models" / name)
            store.set(f"made/{name}", "")
        store.wait([f"made/{name}"])
        try:
            found = compare(harness, directory / "models" / name)
        except InvalidInput as error:
            found = {"refused": error.message}
        if rank == 0:
            (directory / f"{name}.json").write_text(json.dumps(found))
    harness.worker.close()
