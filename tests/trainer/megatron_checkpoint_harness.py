"""Runs real Megatron ranks that save and are killed, and then others that load, in other layouts.

`main` forks all of them from one process that has imported everything. They write their results to
DIRECTORY/NAME.{safetensors,json}, and DIRECTORY/checkpoints has what was saved.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import threading
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.common.errors import LockstepError
from services.trainer.checkpoint.manifest import begin
from services.trainer.megatron import checkpoint as megatron_checkpoint
from services.trainer.megatron import optimizer as megatron_optimizer
from services.trainer.megatron import torch_dist
from tests.support import PATIENCE_S, descendants
from tests.trainer.fsdp_harness import samples, write
from tests.trainer.loss_harness import tensors_of
from tests.trainer.megatron_harness import MegatronHarness, run_ranks
from tests.trainer.megatron_layouts import CP, EP, PP, SMALL, TP, VPP, Layout

Pairs = Collection[tuple[str, str]]
BUCKETS = {"fully_reshardable": False}
PLAIN = {"use_distributed_optimizer": False}
ASYNC = {"async_save": True}
# So few bytes that the small models here are read in several batches, not as many on one rank as on another.
BATCH_BYTES = 1 << 18
BF16 = SMALL | {"compute_dtype": "bfloat16"}
LORA = SMALL | {"lora": {"rank": 4}}
DROPOUT = SMALL | {"lora": {"rank": 4, "dropout": 0.2}}
LAYOUTS = {
    "1": Layout("untied", 1, {}, SMALL),
    "dp2": Layout("untied", 2, {}, SMALL),
    "tp2": Layout("untied", 2, TP, SMALL),
    "pp2": Layout("untied", 2, PP, SMALL),
    "cp2": Layout("untied", 2, CP, SMALL),
    "tp2-dp2": Layout("untied", 4, TP, SMALL),
    "tp2-offload": Layout("untied", 2, TP | {"auto_offload": True}, SMALL),
    "dp2-plain": Layout("untied", 2, PLAIN, SMALL),
    "dp2-bf16": Layout("untied", 2, {}, BF16),
    "dp2-plain-bf16": Layout("untied", 2, PLAIN, BF16),
    "1-buckets": Layout("untied", 1, BUCKETS, SMALL),
    "dp2-buckets": Layout("untied", 2, BUCKETS, SMALL),
    "tp2-buckets": Layout("untied", 2, BUCKETS | TP, SMALL),
    "tp2-async": Layout("untied", 2, TP | {"async_save": True, "auto_offload": True}, SMALL),
    "dp2-async": Layout("untied", 2, ASYNC, SMALL),
    "dp2-plain-async": Layout("untied", 2, ASYNC | PLAIN, SMALL),
    "dp2-buckets-async": Layout("untied", 2, ASYNC | BUCKETS, SMALL),
    "tied-pp2": Layout("tied", 2, PP, SMALL),
    "tied-tp2": Layout("tied", 2, TP, SMALL),
    "deep-1": Layout("deep", 1, {}, SMALL),
    "deep-vpp2": Layout("deep", 2, PP | VPP, SMALL),
    "moe-1": Layout("moe", 1, {}, SMALL),
    "moe-ep2": Layout("moe", 2, EP, SMALL),
    "moe-ep2-etp2": Layout("moe", 4, TP | EP, SMALL),
    "qwen2_moe-1": Layout("qwen2_moe", 1, {}, SMALL),
    "qwen2_moe-tp2": Layout("qwen2_moe", 2, TP, SMALL),
    "qwen2_moe-ep2": Layout("qwen2_moe", 2, EP, SMALL),
    "gpt_oss-1": Layout("gpt_oss", 1, {}, SMALL),
    "gpt_oss-tp2": Layout("gpt_oss", 2, TP, SMALL),
    "latent-tp2-ep2": Layout("deepseek_v3", 2, TP | EP | {"expert_tensor_parallel_size": 1}, SMALL),
    "latent-pp2": Layout("deepseek_v3", 2, PP, SMALL),
    "lora-tp2": Layout("untied", 2, TP, LORA),
    "lora-tp2-dropout": Layout("untied", 2, TP, DROPOUT),
    "lora-pp2": Layout("untied", 2, PP, LORA),
}
# Each pair: the layout a checkpoint is saved under, and the layout it is loaded under.
PAIRS = [
    ("tp2", "pp2"),
    ("tp2-dp2", "1"),
    ("1", "cp2"),
    ("dp2", "tp2"),
    ("dp2", "dp2-plain"),
    ("dp2-buckets", "1-buckets"),
    ("tied-pp2", "tied-tp2"),
    ("deep-vpp2", "deep-1"),
    ("moe-ep2", "moe-ep2-etp2"),
    ("moe-ep2-etp2", "moe-1"),
    ("moe-1", "moe-ep2"),
    ("qwen2_moe-tp2", "qwen2_moe-1"),
    ("qwen2_moe-1", "qwen2_moe-ep2"),
    ("gpt_oss-tp2", "gpt_oss-1"),
    ("latent-tp2-ep2", "latent-pp2"),
    ("lora-tp2", "lora-pp2"),
    ("dp2-bf16", "dp2-plain-bf16"),
]
SAME = ["tp2", "tp2-offload", "dp2-plain-bf16", "dp2-buckets", "deep-vpp2", "moe-ep2-etp2", "lora-tp2-dropout"]
STAGED = ["dp2-async", "dp2-plain-async", "dp2-buckets-async"]
REFUSED = [
    ("dp2-buckets", "tp2-buckets"),
    ("dp2-buckets", "dp2-plain"),
    ("dp2", "lora-tp2"),
    ("lora-tp2", "tp2"),
    ("dp2", "tied-pp2"),
    ("dp2", "deep-1"),
    ("dp2", "moe-1"),
]
# Only make test-long runs these: the others have what they have, each together with something else.
LONG_PAIRS = {
    *(("1", "cp2"), ("dp2", "tp2"), ("moe-ep2", "moe-ep2-etp2"), ("qwen2_moe-1", "qwen2_moe-ep2")),
    *(("qwen2_moe-tp2", "qwen2_moe-1"), ("gpt_oss-tp2", "gpt_oss-1")),
    *(("lora-tp2", "tp2"), ("dp2", "tied-pp2")),
    *(("dp2", "dp2-plain"), ("tp2-offload", "tp2-offload"), ("dp2-buckets", "dp2-buckets")),
    *(("tp2", "tp2"), ("deep-vpp2", "deep-vpp2"), ("dp2-plain-bf16", "dp2-plain-bf16")),
    ("tied-pp2", "tied-tp2"),
}
CONVERTED = ("dp2", "moe-ep2-etp2")  # whose weights alone are loaded as well


def save(harness: MegatronHarness, path: Path, version: int) -> None:
    if harness.rank == 0:
        begin(path)
    dist.barrier()
    harness.worker.save(path=str(path), state={"version": version, "last_batch_id": "b", "last_metrics": {}})


def go_on(harness: MegatronHarness, directory: Path, name: str) -> None:
    """Makes the update after the checkpoint; writes its metrics and the weights after it."""
    metrics = harness.train(samples(5), version=1)
    weights = harness.weights()
    if harness.rank == 0:
        write(directory, name, weights, metrics)


def save_all(harness: MegatronHarness, directory: Path, pairs: Pairs) -> None:
    """Makes an update, a checkpoint and the next update in every layout of this world that `pairs` save under."""
    names = {saved for saved, _ in pairs} - {"tp2-async"}
    for name in sorted(name for name in names if LAYOUTS[name].world == harness.world):
        harness.open(LAYOUTS[name])
        harness.train(samples())
        save(harness, directory / "checkpoints" / name, version=1)
        weights = harness.weights()
        if harness.rank == 0:
            write(directory, f"{name} weights", weights, {})
        go_on(harness, directory, f"{name} went on")


def load_all(harness: MegatronHarness, directory: Path, pairs: Pairs) -> None:
    for saved, loaded in pairs:
        if (saved, loaded) not in REFUSED and LAYOUTS[loaded].world == harness.world:
            harness.open(LAYOUTS[loaded], checkpoint=str(directory / "checkpoints" / saved))
            go_on(harness, directory, f"{saved} to {loaded}")


def refuse_all(harness: MegatronHarness, directory: Path, pairs: Pairs) -> None:
    """Writes the error of each load that is refused, and whether weights and random state are what they were."""
    for saved, loaded in REFUSED:
        if (saved, loaded) not in pairs or LAYOUTS[loaded].world != harness.world:
            continue
        harness.open(LAYOUTS[loaded])
        before, generator = harness.weights(), torch.get_rng_state()
        error = refusal(lambda path=directory / "checkpoints" / saved: harness.backend.load(path / "state"))
        after = harness.weights()
        unchanged = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        unchanged = unchanged and torch.equal(generator, torch.get_rng_state())
        if harness.rank == 0:
            content = {"error": error, "unchanged": unchanged}
            (directory / f"{saved} to {loaded}.json").write_text(json.dumps(content))


def save_in_background(harness: MegatronHarness, directory: Path) -> None:
    """Makes an update between the copy and the end of a save; then a save that cannot be written, and the next one."""
    harness.open(LAYOUTS["tp2-async"])
    harness.train(samples())
    path = directory / "checkpoints" / "tp2-async"
    with _held_writers() as let_go:
        save(harness, path, version=1)
        go_on(harness, directory, "tp2-async went on")
        is_early = path.exists()
        let_go.set()
    saved = harness.worker.saved()
    blocked = directory / "checkpoints" / "blocked"
    if harness.rank == 0:
        (begin(blocked) / "state").write_text("a file where a directory should be")
    dist.barrier()
    harness.worker.save(path=str(blocked), state={"version": 2, "last_batch_id": "b", "last_metrics": {}})
    error = refusal(harness.worker.saved)
    harness.train(samples(6), version=2)
    save(harness, blocked, version=3)
    harness.worker.saved()
    children = list(descendants(os.getpid()).values())
    if harness.rank == 0:
        content = {"is_early": is_early, "saved": saved, "error": error, "children": children}
        (directory / "background.json").write_text(json.dumps(content))


def stage_all(harness: MegatronHarness, directory: Path) -> None:
    """Records in whose memory the tensors lie that the first rank will write in the background."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values  # after services.trainer.megatron
    from megatron.core.dist_checkpointing.strategies.torch import _unwrap_pyt_sharded_tensor as unwrap

    answers = {}
    for name in STAGED:
        harness.open(LAYOUTS[name])
        harness.train(samples())
        alive = {
            t.untyped_storage().data_ptr()
            for t in (*tensors_of(harness.backend), *megatron_optimizer.state_tensors(harness.backend._optimizer))
        }

        def stage(sharded: dict[str, Any], *, copied: Any, name: str = name, alive: set[int] = alive) -> Any:
            # The tensors are kept, as memory that is freed may be allocated again at the same address. Buckets also
            # have marks of their padding, without data.
            tensors = [shard.data for shard in nested_values(sharded["optimizer"]) if hasattr(shard, "data")]
            made = {tensor.untyped_storage().data_ptr() for tensor in tensors} - alive
            staged = torch_dist.stage(sharded, copied=copied)
            pointers = [(key, t.untyped_storage().data_ptr()) for key, value in staged.items() for t in unwrap(value)]
            optimizer = [pointer for key, pointer in pointers if "optimizer." in key]
            answers[name] = {
                "num_optimizer": len(optimizer),
                "num_as_made": sum(pointer in made for pointer in optimizer),
                "alive": [key for key, pointer in pointers if pointer in alive],
            }
            return staged

        with _instead(megatron_checkpoint, "stage", stage):
            harness.backend.begin_save(directory)
    if harness.rank == 0:
        (directory / "staged.json").write_text(json.dumps(answers))


def count_read(harness: MegatronHarness, directory: Path) -> None:
    """Records the bytes of optimizer state that each data-parallel rank asks for and has in memory at once.

    Also records the error of a load in which one rank asks for tensors that the checkpoint does not have.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values  # after services.trainer.megatron

    rounds: list[int] = []

    def load(sharded: dict[int, Any], path: Path) -> Any:
        loaded = torch_dist.load(sharded, path)
        rounds.append(sum(tensor.nbytes for tensor in nested_values(dict(loaded))))
        return loaded

    with _instead(megatron_optimizer, "load", load):
        harness.open(LAYOUTS["dp2"], checkpoint=str(directory / "checkpoints" / "dp2"))
    pieces = megatron_optimizer.shard_pieces(harness.backend._optimizer, harness.backend._checkpointer._all_tensors())
    later = {index: piece.wanted for index, piece in enumerate(pieces)}
    if harness.rank == 1:
        later[0] = {key: dataclasses.replace(shard, key=f"{key}.elsewhere") for key, shard in later[0].items()}
    error = refusal(lambda: torch_dist.read({}, directory / "checkpoints" / "dp2" / "state", later=later))
    sizes = [12 * parameter.numel() for chunk in harness.backend._model.chunks for parameter in chunk.parameters()]
    answers: list[Any] = [None] * harness.world
    dist.all_gather_object(answers, {"rounds": rounds, "whole": sum(sizes), "largest": max(sizes), "error": error})
    if harness.rank == 0:
        (directory / "read.json").write_text(json.dumps(answers))


@contextlib.contextmanager
def _instead(module: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextlib.contextmanager
def _held_writers() -> Iterator[threading.Event]:
    """Makes writers wait until the event that it yields is set."""
    let_go, original = threading.Event(), megatron_checkpoint.write

    def stuck(*args: Any) -> None:
        assert let_go.wait(PATIENCE_S)
        original(*args)

    with _instead(megatron_checkpoint, "write", stuck):
        yield let_go


def convert_all(harness: MegatronHarness, directory: Path) -> None:
    """Loads weights alone, from our checkpoints and from one of the kind that Megatron's own tools write.

    Also records the errors of checkpoints that are refused.
    """
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # after services.trainer.megatron

    checkpoints = directory / "checkpoints"
    plain = directory / "plain"
    if harness.rank == 0:
        plain.mkdir()
    dist.barrier()
    harness.open(LAYOUTS["pp2"])
    policy = harness.backend._model
    tensors = {name: tensor for chunk in policy.bare_chunks() for name, tensor in chunk.sharded_state_dict().items()}
    add_prefix_for_sharding(tensors, "model.")
    torch_dist.write(torch_dist.stage({"model": tensors}), plain, None)
    if harness.rank == 0:  # a pickle of more than tensors, as Megatron's are
        torch.save({"args": Namespace(lr=1.0)}, plain / "common.pt")
    before = harness.weights()
    if harness.rank == 0:
        write(directory, "plain", before, {})
    sources = {name: checkpoints / name / "state" for name in CONVERTED} | {"plain": plain}
    for name, source in sources.items():
        layout = LAYOUTS["moe-ep2" if name.startswith("moe") else "tp2"]
        harness.open(_converted(layout, source))
        weights = harness.weights()
        if harness.rank == 0:
            write(directory, f"converted {name}", weights, {})
    wrong = {
        "experts": ("moe8", checkpoints / "moe-ep2-etp2" / "state"),
        "dense": ("moe", checkpoints / "dp2" / "state"),
        "deep": ("untied", checkpoints / "deep-vpp2" / "state"),
        "nothing": ("untied", directory),
        "changed": ("untied", checkpoints / "changed" / "state"),
    }
    if harness.rank == 0:
        shutil.copytree(checkpoints / "dp2", checkpoints / "changed")
        with next((checkpoints / "changed" / "state").glob("*.distcp")).open("ab") as file:
            file.write(b"x")
    dist.barrier()
    errors = {
        name: refusal(lambda kind=kind, source=source: harness.open(_converted(Layout(kind, 2, {}, SMALL), source)))
        for name, (kind, source) in wrong.items()
    }
    if harness.rank == 0:
        (directory / "converted.json").write_text(json.dumps(errors))


def _converted(layout: Layout, source: Path) -> Layout:
    return dataclasses.replace(layout, megatron=layout.megatron | {"dist_checkpointing_path": str(source)})


def refusal(call: Callable[[], Any]) -> list[str]:
    """Returns the class and the message of the error that `call` raises, or an empty list if it raises none."""
    try:
        call()
    except LockstepError as error:
        return [type(error).__name__, error.message]
    return []


def play(world: int, directory: Path, acts: list[Callable[[MegatronHarness, Path], None]]) -> None:
    """Runs `acts` on `world` ranks, which are killed when all have done them."""

    def all_acts(harness: MegatronHarness) -> None:
        for act in acts:
            act(harness, directory)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    if set(codes := run_ranks(world, directory, all_acts)) != {-signal.SIGKILL}:
        raise SystemExit(f"{acts} of {world} ranks ended with {codes}")


def main(directory: Path, pairs: Pairs) -> None:
    """Saves under the first layout of each pair, and loads that under the second."""
    megatron_optimizer._BATCH_BYTES = BATCH_BYTES
    save, load, refuse = (functools.partial(act, pairs=pairs) for act in (save_all, load_all, refuse_all))
    for world in (1, 2, 4):
        play(world, directory, [save, save_in_background, stage_all] if world == 2 else [save])
    for world in (1, 2, 4):
        play(world, directory, [load, refuse, convert_all, count_read] if world == 2 else [load, refuse])
