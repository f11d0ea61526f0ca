"""Trains the models of the zoo on two ranks with strategy fsdp, and compares each with transformers on single samples.

`main` runs one rank; rank 0 writes what it measured, or the refusal, to DIRECTORY/<name>.json. It trains whole models,
or adapters.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from services.common import batches
from services.common.errors import InvalidInput
from services.trainer.backend import Role
from services.trainer.checkpoint.manifest import begin
from services.trainer.checkpoint.ranks import gather_json
from services.trainer.samples import forward_parts
from services.trainer.structure import class_of, make_model
from tests.support import write_tokenizer
from tests.trainer import plain_grpo
from tests.trainer.fsdp_harness import TEMPERATURE, Harness, config, samples
from tests.trainer.harness_processes import start_harness
from tests.trainer.zoo import ZOO

SETTINGS: dict[str, Any] = {"max_tokens_per_microbatch": 64}
"""Several micro-batches on each rank, of several sequences."""
LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0}
ADAPTED = SETTINGS | {"lora": LORA}


def zoo_config(name: str, **sizes: int) -> PretrainedConfig:
    kind, settings = ZOO[name]
    return CONFIG_MAPPING[kind](**json.loads(json.dumps(settings)) | sizes)  # some classes change what they are given


def make_zoo_model(name: str, directory: Path, **sizes: int) -> Path:
    """Writes the model with a character tokenizer; `sizes` replace the zoo's. Returns `directory`."""
    torch.manual_seed(0)
    model = make_model(zoo_config(name, **sizes), dtype=torch.float32)
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
    harness.open(directory.name, SETTINGS)
    got = _scores(harness, SETTINGS)
    gradients, _ = harness.gradients_of(samples())
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


def compare_adapters(harness: Harness, directory: Path) -> dict[str, Any]:
    """Makes updates of adapters, exports the merged model and resumes from a checkpoint.

    Returns the largest differences: of merged weights from base + alpha / rank * B A, of the exported model's
    log-probabilities from the trainer's, of these from those before the update, and of adapters after the update that
    is made again after resuming; and which layers have adapters that an update has changed, which parameters got
    gradients, and which targets of the exported adapters are no modules of transformers' model.
    """
    name, export, checkpoint = directory.name, directory / "export", directory / "checkpoint"
    harness.open(name, ADAPTED)
    before = _scores(harness, ADAPTED)
    trained, _ = harness.gradients_of(samples())
    if harness.rank == 0:
        begin(export)
        begin(checkpoint)
    dist.barrier()
    harness.worker.export(path=str(export))
    harness.worker.save(path=str(checkpoint), state={"version": 1, "last_batch_id": "b", "last_metrics": {}})
    got, wrong = _scores(harness, ADAPTED), _distance_of_merged(harness)
    harness.train(samples(seed=5), version=1)
    went_on = _adapters(harness)
    harness.open(name, ADAPTED, checkpoint=str(checkpoint))
    harness.train(samples(seed=5), version=1)
    resumed = _adapters(harness)
    if harness.rank:
        return {}
    model = class_of(zoo_config(name)).from_pretrained(export, dtype=torch.float32, attn_implementation="eager")
    targets = json.loads((export / "adapter" / "adapter_config.json").read_text())["target_modules"]
    with torch.no_grad():
        want = [plain_grpo.score(model.eval(), row, TEMPERATURE)[0] for row in samples().to_pylist()]
    return {
        "merged": wrong,
        "logprob": max(float((torch.tensor(a) - b).abs().max()) for a, b in zip(got, want, strict=True)),
        "moved": max(abs(a - b) for row in zip(got, before, strict=True) for a, b in zip(*row, strict=True)),
        "resumed": max(float((resumed[key] - went_on[key]).abs().max()) for key in went_on),
        "adapted": sorted({key.split(".lora_B")[0] for key, b in went_on.items() if ".lora_B" in key and b.any()}),
        "trained": sorted(trained),
        "unmatched": sorted(set(targets) - {module for module, _ in model.named_modules()}),
    }


def _adapters(harness: Harness) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in harness.backend.adapter()}


def _distance_of_merged(harness: Harness) -> float:
    base = {name: tensor.clone() for name, tensor in harness.backend.base()}
    merged = {name: tensor.clone() for name, tensor in harness.backend.weights()}
    for name, b in (adapters := _adapters(harness)).items():
        if ".lora_B" in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_B", "")
            a, scale = adapters[name.replace("lora_B", "lora_A")], LORA["alpha"] / LORA["rank"]
            base[weight] = (base[weight].double() + scale * b.double() @ a.double()).float()
    return max(float((merged[name] - base[name]).abs().max()) for name in merged)


def _scores(harness: Harness, settings: dict[str, Any]) -> list[list[float]]:
    """Returns the policy's log-probabilities in the batch's order."""
    pads_rows = harness.backend.pads_rows
    parts, order = forward_parts(samples(), config(settings), harness.world, pads_rows=pads_rows)
    body = parts[harness.rank]
    answer = harness.worker.forward(role=Role.POLICY, **body.body, frames=body.frames, temperature=TEMPERATURE)
    return _gathered(answer.frames, order)


def _gathered(frames: list[bytes], order: list[int]) -> list[list[float]]:
    """Returns the log-probabilities of all ranks in the batch's order."""
    rows = batches.decode(frames)["logprobs"].to_pylist()
    flat = [row for rank in gather_json(rows, torch.device("cpu")) for row in rank]
    return [flat[index] for index in order]


def played(directory: Path, names: list[str], what: str = "compare") -> dict[str, dict[str, Any]]:
    """Runs the ranks on the models; returns what the function `what` found, or the refusal, by the model's name."""
    ranks = [start_harness("zoo_harness", rank, 2, directory, names, what) for rank in range(2)]
    try:
        for rank in ranks:
            rank.join(1800)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in names}


def main(rank: int, world: int, directory: Path, names: list[str], what: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world)
    harness = Harness(store, rank, world, directory / "models")
    for name in names:
        if rank == 0:
            make_zoo_model(name, directory / "models" / name)
            store.set(f"made/{name}", "")
        store.wait([f"made/{name}"])
        try:
            found = (compare if what == "compare" else compare_adapters)(harness, directory / "models" / name)
        except InvalidInput as error:
            found = {"refused": error.message}
        if rank == 0:
            (directory / f"{name}.json").write_text(json.dumps(found))
    harness.worker.close()
