"""Runs real trainer ranks with a critic, on both backends.

One process imports everything and forks the ranks of one world after the other. They write their results to
DIRECTORY/NAME.{safetensors,json}.
"""

import functools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from services.common.config.trainer import CriticSettings, ReferenceConfig
from services.trainer.backend import PARAMS, Role
from services.trainer.checkpoint.manifest import begin
from services.trainer.fsdp.backend import FsdpBackend
from services.trainer.fsdp.model import WeightStream
from tests.trainer.fsdp_harness import samples, write
from tests.trainer.megatron_checkpoint_harness import refusal
from tests.trainer.megatron_harness import MegatronHarness, config, run_all, run_ranks
from tests.trainer.megatron_layouts import CP, EP, PP, SMALL, TP, UNPACKED, VPP, Layout

Pairs = Collection[tuple[str, str]]
HEAD = "value_head.weight"
VALUE_LOSS = {"value_clip": 0.2, "aggregation": "seq_mean_token_mean"}
FSDP = SMALL | {"strategy": "fsdp"}
BF16 = {"compute_dtype": "bfloat16"}
HALVES = {"num_minibatches": 2}
NO_SP = TP | {"sequence_parallel": False}
NUM_UPDATES = 2
"""The head begins at 0: the first update moves it alone, the second moves the body too."""


def _layouts() -> Iterator[tuple[str, Layout]]:
    """Yields layouts by name; their `like` is one rank of FSDP, which is itself compared with plain torch."""
    for kind in ("untied", "tied", "moe", "deep"):
        yield f"{kind}-fsdp", Layout(kind, 1, {}, FSDP)
    yield "halves-fsdp", Layout("untied", 1, {}, FSDP | HALVES)
    dense: dict[str, tuple[int, dict[str, Any]]] = {
        "1": (1, {}),
        "tp2": (2, TP),
        "tp2-no-sp": (2, NO_SP),
        "pp2": (2, PP),
        "cp2": (2, CP),
        "dp2": (2, {}),
        "dp2-plain": (2, {"use_distributed_optimizer": False}),
        "tp2-unpacked": (2, TP | UNPACKED),
        "tp2-auto_offload": (2, TP | {"auto_offload": True}),
        "tp2-pp2": (4, TP | PP),
    }
    for name, (world, megatron) in dense.items():
        yield f"untied-{name}", Layout("untied", world, megatron, SMALL, "untied-fsdp")
    yield "untied-tp2-recompute", Layout("untied", 2, TP, SMALL | {"gradient_checkpointing": True}, "untied-fsdp")
    yield "tied-pp2", Layout("tied", 2, PP, SMALL, "tied-fsdp")
    yield "tied-tp2", Layout("tied", 2, TP, SMALL, "tied-fsdp")
    yield "deep-vpp2", Layout("deep", 2, PP | VPP, SMALL, "deep-fsdp")
    yield "moe-ep2", Layout("moe", 2, EP, SMALL, "moe-fsdp")
    yield "halves-tp2", Layout("untied", 2, TP, SMALL | HALVES, "halves-fsdp")
    for kind in ("untied", "tied"):
        yield f"{kind}-fsdp-dp2", Layout(kind, 2, {}, FSDP, f"{kind}-fsdp")
    yield "bf16-fsdp", Layout("untied", 1, {}, FSDP | BF16)
    yield "bf16-tp2", Layout("untied", 2, TP, SMALL | BF16)


LAYOUTS = dict(_layouts())
# Only make test-long runs the other layouts: these have what they have, each together with something else.
LONG = LAYOUTS.keys() - {
    *("untied-fsdp", "tied-fsdp", "moe-fsdp", "deep-fsdp", "halves-fsdp", "untied-fsdp-dp2", "bf16-tp2"),
    *("untied-cp2", "untied-dp2-plain", "untied-tp2-no-sp", "untied-tp2-pp2"),
    *("tied-pp2", "deep-vpp2", "moe-ep2", "halves-tp2"),
}
# Policy, reference and critic on the same ranks: their layouts, and the order of calls. The letters p, r and c are
# forwards of these roles, capitals are their updates, and x opens the critic anew.
SHARED: dict[str, tuple[dict[Role, Layout], str]] = {
    "fsdp": (dict.fromkeys(Role, Layout("untied", 2, {}, FSDP)), "rcCPcpCrP"),
    "mixed": (
        {
            Role.POLICY: Layout("untied", 2, TP, SMALL),
            Role.REFERENCE: Layout("untied", 2, {}, FSDP),
            Role.CRITIC: Layout("tied", 2, PP, SMALL),
        },
        "PCxcPpCPr",
    ),
    "offload": (
        {
            Role.POLICY: Layout("untied", 2, {"auto_offload": True}, SMALL),
            Role.REFERENCE: Layout("untied", 2, {"param_offload": True}, SMALL),
            Role.CRITIC: Layout("untied", 2, CP | {"auto_offload": True}, SMALL),
        },
        "pPcCPrpCx",
    ),
}
# Each pair: the layout a checkpoint is saved under, and the layout it is loaded under.
CHECKPOINTS = [
    ("untied-tp2", "untied-tp2"),
    ("untied-tp2", "untied-pp2"),
    ("tied-pp2", "tied-tp2"),
    ("untied-fsdp-dp2", "untied-fsdp-dp2"),
    ("untied-fsdp-dp2", "untied-fsdp"),
]
# As above; tests/trainer/test_memory.py moves the memory of all roles.
LONG_PAIRS = {("tied-pp2", "tied-tp2"), ("untied-fsdp-dp2", "untied-fsdp")}
LONG_SHARED = {"fsdp", "offload"}
MISTAKEN = ("untied-tp2", "tied-fsdp-dp2")


def critic_config(layout: Layout, value_loss: Mapping[str, Any] = VALUE_LOSS) -> CriticSettings:
    return CriticSettings.model_validate({**config(layout).model_dump(), "value_loss": value_loss})


def critic_samples(seed: int = 0) -> pa.Table:
    """Returns `samples` with the columns that a critic is trained on."""
    return with_returns(samples(seed), seed)


def with_returns(table: pa.Table, seed: int = 0) -> pa.Table:
    """Returns `table` with values near 0, returns of size 1, and a loss mask that masks all tokens of one sample."""
    random = np.random.default_rng(seed + 2)
    lengths = [len(tokens) for tokens in table["tokens"]]
    columns = {
        "values": [random.normal(0, 0.1, n).tolist() for n in lengths],
        "returns": [random.normal(1, 1, n).tolist() for n in lengths],
        "loss_mask": [(random.random(n) < (0.8 if row != 4 else 0)).tolist() for row, n in enumerate(lengths)],
    }
    for name, rows in columns.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(rows, table.schema.field(index).type))
    return table


def open_critic(harness: MegatronHarness, layout: Layout, checkpoint: str = "") -> None:
    """Opens the critic alone, as on ranks of its own."""
    harness.worker.close()
    harness._settings, harness._data_ranks = {}, {}
    harness.open_role(Role.CRITIC, layout.kind, critic_config(layout), checkpoint)


def values(harness: MegatronHarness) -> list[list[float]]:
    return [row.tolist() for row in harness.forward(critic_samples(), Role.CRITIC, "values")]


def critic_weights(harness: MegatronHarness) -> dict[str, torch.Tensor]:
    """Returns the body's weights under checkpoint names, and the head.

    All Megatron ranks that have a head must have the same; the first's is returned.
    """
    backend = harness.worker._backends[Role.CRITIC]
    if isinstance(backend, FsdpBackend):
        body = WeightStream(backend._model.causal_lm, torch.float32, backend.device)
        head = backend._model.value_head.weight.detach().full_tensor()
        return {name: tensor.clone() for name, tensor in body} | {HEAD: head}
    # Megatron's library is large, so its backend is imported only where it is used.
    from services.trainer.megatron.stream import WeightStream as ShardStream
    from services.trainer.megatron.weights import local_parameters

    chunks, parallelism = backend._model.bare_chunks(), backend._model.parallelism
    body = ShardStream(local_parameters(chunks, parallelism), backend._map.part, parallelism, backend.device)
    tensors = {name: tensor.clone() for name, tensor in backend._streamed(body.to_first())}
    backend.offloader.load(PARAMS)
    own = chunks[-1].output_layer.weight.detach().clone() if parallelism.is_last_stage else None
    backend.offloader.offload(PARAMS)
    gathered: list[Any] = [None] * harness.world
    dist.all_gather_object(gathered, own)
    heads = [head for head in gathered if head is not None]
    assert all(torch.equal(head, heads[0]) for head in heads)
    return tensors | {HEAD: heads[0]}


def run(harness: MegatronHarness, name: str, directory: Path) -> None:
    """Writes the values before and after some updates, and the weights after them."""
    open_critic(harness, LAYOUTS[name])
    num_threads, num_files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    states, updates = [values(harness)], []
    for seed in range(NUM_UPDATES):
        updates.append(harness.train(critic_samples(seed), version=seed, role=Role.CRITIC))
    states.append(values(harness))
    weights = critic_weights(harness)
    if harness.rank == 0:
        answers = {"values": states, "updates": updates, "num_threads": num_threads, "num_files": num_files}
        write(directory, name, weights, answers)


def share(harness: MegatronHarness, name: str, directory: Path) -> None:
    """Runs all roles together, the policy with the reference, and the critic alone; writes exact results by letter."""
    layouts, order = SHARED[name]
    parts = {"together": order, "policy": set(order) & set("pPr"), "critic": set(order) & set("cCx")}
    answers = {part: _play(harness, layouts, [x for x in order if x in letters]) for part, letters in parts.items()}
    if harness.rank == 0:
        (directory / f"shared-{name}.json").write_text(json.dumps(answers))


def _play(harness: MegatronHarness, layouts: Mapping[Role, Layout], order: Sequence[str]) -> dict[str, list[Any]]:
    harness.worker.close()
    harness._settings, harness._data_ranks = {}, {}
    settings = {
        Role.POLICY: config(layouts[Role.POLICY]),
        Role.REFERENCE: ReferenceConfig().settings(config(layouts[Role.REFERENCE])),
        Role.CRITIC: critic_config(layouts[Role.CRITIC]),
    }
    roles = {
        letter.lower(): role for letter, role in zip("prc", settings, strict=True) if letter in "".join(order).lower()
    }
    for role in roles.values():
        harness.open_role(role, layouts[role].kind, settings[role])
    done: dict[str, list[Any]] = {letter: [] for letter in order}
    for letter in order:
        if letter == "x":
            harness.open_role(Role.CRITIC, layouts[Role.CRITIC].kind, settings[Role.CRITIC])
            continue
        role, number = roles[letter.lower()], len(done[letter])
        if letter.isupper():
            done[letter].append(harness.train(critic_samples(number), version=number, role=role))
        else:
            column = "values" if role is Role.CRITIC else "logprobs"
            done[letter].append([row.tolist() for row in harness.forward(critic_samples(), role, column)])
    if "p" in roles:
        done["weights"] = [float(tensor.double().sum()) for tensor in harness.weights().values()]
    if "c" in roles:
        done["critic weights"] = [float(tensor.double().sum()) for tensor in critic_weights(harness).values()]
    return done


def save(harness: MegatronHarness, path: Path, role: Role) -> None:
    if harness.rank == 0:
        begin(path)
    dist.barrier()
    harness.worker.save(path=str(path), state={"version": 1, "last_batch_id": "b", "last_metrics": {}}, role=role)


def save_all(harness: MegatronHarness, directory: Path, pairs: Pairs) -> None:
    """Makes an update and saves a checkpoint, whose files may be written while the next update is made."""
    for name in sorted({name for name, _ in pairs}):
        layout = LAYOUTS[name]
        is_async = {} if "fsdp" in name else {"async_save": True}
        open_critic(harness, replace(layout, megatron={**layout.megatron, **is_async}))
        harness.train(critic_samples(), role=Role.CRITIC)
        save(harness, directory / "checkpoints" / name, Role.CRITIC)
        _go_on(harness, directory, f"{name} went on")
        if is_async:
            harness.worker.saved()


def load_all(harness: MegatronHarness, directory: Path, pairs: Pairs) -> None:
    for saved, loaded in pairs:
        if LAYOUTS[loaded].world == harness.world:
            open_critic(harness, LAYOUTS[loaded], str(directory / "checkpoints" / saved))
            _go_on(harness, directory, f"{saved} to {loaded}")


def _go_on(harness: MegatronHarness, directory: Path, name: str) -> None:
    metrics = harness.train(critic_samples(5), version=1, role=Role.CRITIC)
    weights = critic_weights(harness)
    if harness.rank == 0:
        write(directory, name, weights, metrics)


def mistake_all(harness: MegatronHarness, directory: Path) -> None:
    """Loads the policy's checkpoint as the critic and the critic's as the policy.

    Writes both errors, and whether the policy that is open has the same weights as before.
    """
    for name in MISTAKEN:
        layout = LAYOUTS[name]
        paths = {role: directory / "checkpoints" / f"{name}-{role}" for role in (Role.POLICY, Role.CRITIC)}
        open_critic(harness, layout)
        save(harness, paths[Role.CRITIC], Role.CRITIC)
        harness.worker.close()
        harness.open_role(Role.POLICY, layout.kind, config(layout))
        save(harness, paths[Role.POLICY], Role.POLICY)
        before = harness.weights()
        to_critic = refusal(
            lambda layout=layout, path=paths[Role.POLICY]: harness.open_role(
                Role.CRITIC, layout.kind, critic_config(layout), str(path)
            )
        )
        to_policy = refusal(lambda path=paths[Role.CRITIC]: harness.backend.load(path / "state"))
        after = harness.weights()
        unchanged = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        if harness.rank == 0:
            content = {"critic": to_critic, "policy": to_policy, "unchanged": unchanged}
            (directory / f"{name}-mistaken.json").write_text(json.dumps(content))


def convert(harness: MegatronHarness, directory: Path) -> None:
    """Opens a critic whose body is that of a policy's Megatron checkpoint; writes its values and weights."""
    source = directory / "checkpoints" / f"{MISTAKEN[0]}-{Role.POLICY}" / "state"
    layout = LAYOUTS["untied-pp2"]
    open_critic(harness, replace(layout, megatron=layout.megatron | {"dist_checkpointing_path": str(source)}))
    answers, weights = {"values": values(harness)}, critic_weights(harness)
    if harness.rank == 0:
        write(directory, "converted", weights, answers)


def act(harness: MegatronHarness, directory: Path, names: Sequence[str], pairs: Pairs, shared: Sequence[str]) -> None:
    run_all(harness, directory, (name for name in names if LAYOUTS[name].world == harness.world), run)
    if harness.world == 2:
        save_all(harness, directory, pairs)
        mistake_all(harness, directory)
        convert(harness, directory)
        for name in shared:
            share(harness, name, directory)
    load_all(harness, directory, pairs)


def main(directory: Path, names: Sequence[str], pairs: Pairs, shared: Sequence[str]) -> int:
    """Runs all ranks in the layouts `names`, with the checkpoints `pairs` and the roles of `shared`; returns 0 if every
    rank came to its end, else 1."""
    work = functools.partial(act, directory=directory, names=names, pairs=pairs, shared=shared)
    for world in (4, 2, 1):  # one rank loads what two saved
        if any(run_ranks(world, directory, work)):
            return 1
    return 0
