"""Compares Lockstep's weight maps with mbridge, on real ranks that hold a model in many layouts.

Each case builds one model by Lockstep and by mbridge. Weights are read by Lockstep's map, by mbridge's own
`load_weights`, and by the trainer's use of mbridge; they are written by the same three. `main` forks the ranks of a
world, runs cases, updates and mutants on them, and writes what differs to DIRECTORY/{cases,updates,mutants}.json.
"""

import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mbridge.core.util
import torch
import torch.distributed as dist
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core import parallel_state

from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.trainer.checkpoint.ranks import gather_json
from services.trainer.compat.megatron.state import NO_GROUPS, set_groups
from services.trainer.megatron import mbridge as bridging
from services.trainer.megatron.mbridge import Bridged
from services.trainer.megatron.model import Chunk, LogprobModel, build_chunks, maker
from services.trainer.megatron.role import Parallelism
from services.trainer.megatron.settings import layer_settings, read_config, transformer_config
from services.trainer.megatron.stream import WeightStream
from services.trainer.megatron.weights import WeightMap, _named_matrices, load_checkpoint_weights, local_parameters
from tests.support import with_routed_experts
from tests.trainer.fsdp_harness import BASE, samples
from tests.trainer.megatron_harness import MegatronHarness, run_ranks
from tests.trainer.megatron_layouts import SMALL, Layout

Function = Callable[..., Any]
Tensors = Mapping[str, torch.Tensor]

_CPU = torch.device("cpu")
# As the trainer's shim does for Megatron: mbridge receives the tensors of other pipeline stages on the current device.
vars(mbridge.core.util)["torch"] = vars(parallel_state)["torch"]


class View:
    """What mbridge's `load_weights` and `export_weights` read of a chunk: its parameters as TransformerEngine's."""

    def __init__(self, chunk: Chunk, bridge: Any):
        self.decoder = chunk.decoder
        self._named = {bridge._fused(name): tensor for name, tensor in _named_matrices(chunk)}

    def state_dict(self) -> Tensors:
        return self._named

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._named.items()


class Comparison:
    """One model on this rank: `differences` has what is not equal to the bit."""

    def __init__(self, path: Path, world: int, megatron: Mapping[str, Any]):
        changes = {"strategy": "megatron", "num_ranks": world, "megatron": megatron}
        self._trainer = TrainerConfig.model_validate({**BASE, **changes})
        self._path, self._hf = str(path), read_config(str(path))
        self.differences: list[str] = []

    def run(self) -> list[str]:
        hf, trainer = self._hf, self._trainer
        self._parallelism = Parallelism(trainer.megatron, timeout_s=60, seed=0)
        config = transformer_config(layer_settings(hf), trainer, torch.float32, is_gpu=False)
        bridged = Bridged.of(hf, trainer, torch.float32, is_gpu=False)
        self._compare_configs(config, bridged.config)
        own_map = WeightMap(bridged.weights.model)
        own = self._parameters(build_chunks(maker(LogprobModel, config, hf), config, trainer.megatron, own_map.model))
        load_checkpoint_weights(own, own_map, self._parallelism, self._path)
        chunks = build_chunks(bridged.make_chunk, bridged.config, trainer.megatron, own_map.model)
        theirs = self._parameters(chunks)
        views = [View(chunk, bridged.bridge) for chunk in chunks]
        wanted = {name: tensor.detach() for name, tensor in own.items()}
        # DeepSeek-V3's own reads bfloat16 only.
        vars(bridged.bridge)["_get_safetensor_io"] = SafeTensorIO
        with torch.no_grad():
            bridged.bridge.load_weights(views, self._path)
        loaded = {name: tensor.detach() for name, tensor in theirs.items()}
        self._compare("mbridge loads", loaded, wanted)
        for tensor in loaded.values():
            tensor.zero_()
        load_checkpoint_weights(theirs, bridged.weights, self._parallelism, self._path)
        self._compare("the trainer loads", loaded, wanted)
        exported = self._exported(own, own_map)
        self._compare("mbridge exports", dict(bridged.bridge.export_weights(views)), exported)
        self._compare("the trainer exports", self._exported(theirs, bridged.weights), exported)
        return self.differences

    def _parameters(self, chunks: Sequence[Chunk]) -> Tensors:
        return local_parameters(chunks, self._parallelism)

    def _exported(self, parameters: Tensors, weights: WeightMap) -> Tensors:
        """Returns whole tensors on rank 0, and their shapes on the meta device elsewhere."""
        published = {name: tensor for name, tensor in parameters.items() if weights.is_published(name)}
        stream = WeightStream(published, weights.part, self._parallelism, _CPU)
        whole = {name: tensor.clone() for name, tensor in stream.to_first()}
        specs = dict(stream.specs())
        return whole if dist.get_rank() == 0 else specs

    def _compare(self, what: str, got: Tensors, want: Tensors) -> None:
        for name in sorted(got.keys() ^ want.keys()):
            self.differences.append(f"{what}: {name} is only in one of the two")
        for name in sorted(got.keys() & want.keys()):
            a, b = got[name], want[name]
            is_same = a.shape == b.shape and a.dtype == b.dtype
            if not is_same or not (b.is_meta or torch.equal(a, b)):
                self.differences.append(f"{what}: {name} differs")

    def _compare_configs(self, own: Any, theirs: Any) -> None:
        for name, value in vars(own).items():
            other = getattr(theirs, name)
            if name == "moe_layer_freq":
                value, other = _expert_layers(own), _expert_layers(theirs)
            if not callable(value) and value != other:
                self.differences.append(f"the config: {name} is {other}, not {value}")


def _expert_layers(config: Any) -> list[int]:
    """Returns 1 for each layer with experts, if the model has any, else 0."""
    every = config.moe_layer_freq
    return [int(number % every == 0) for number in range(config.num_layers)] if isinstance(every, int) else every


def of_all_ranks(problems: list[str]) -> list[str]:
    return [problem for theirs in gather_json(problems, _CPU) for problem in theirs]


def compare(harness: MegatronHarness, models: Path, kind: str, megatron: Mapping[str, Any]) -> list[str]:
    """Returns the differences of all ranks for a model with these parallel sizes."""
    start_anew(harness)
    return of_all_ranks(Comparison(models / kind, harness.world, megatron).run())


def start_anew(harness: MegatronHarness) -> None:
    """Frees models and process groups, each of which has threads."""
    set_groups(NO_GROUPS)
    harness.worker.close()
    harness.worker._start_process_group(timedelta(minutes=5))


def update(harness: MegatronHarness, kind: str, megatron: Mapping[str, Any], directory: Path) -> list[str]:
    """Returns what an update with mbridge has that one without does not: both compute the same in the same order."""
    batch = with_routed_experts(samples(0), num_layers=4) if "moe" in kind else samples(0)
    results = []
    for use_mbridge in (False, True):
        harness.open(Layout(kind, harness.world, {**megatron, "use_mbridge": use_mbridge}, SMALL))
        before, published = harness.weights(), harness.published()
        logprobs = [row.tolist() for row in harness.logprobs(batch)]
        metrics = harness.train(batch)
        harness.backend.save(directory / f"{kind}-{use_mbridge}")
        results.append({"before": before, "published": published, "logprobs": logprobs, "metrics": metrics})
        results[-1]["after"] = harness.weights()
    harness.open(Layout(kind, harness.world, {**megatron, "use_mbridge": False}, SMALL))
    harness.backend.load(directory / f"{kind}-True")
    results[1]["loaded"], results[0]["loaded"] = harness.weights(), results[0]["after"]
    own, bridged = results
    wrong = [what for what in ("published", "logprobs", "metrics") if own[what] != bridged[what]]
    assert torch.is_tensor(next(iter(own["after"].values())))
    for what in ("before", "after", "loaded"):
        a, b = own[what], bridged[what]
        if a.keys() != b.keys() or (harness.rank == 0 and not all(torch.equal(a[name], b[name]) for name in a)):
            wrong.append(what)
    changed = harness.rank or any(not torch.equal(own["before"][n], own["after"][n]) for n in own["after"])
    return wrong if changed else [*wrong, "the update changed nothing"]


def made_once(make: Function) -> Function:
    made: dict[str, Any] = {}

    def make_once(hf: Any) -> Any:
        key = hf.to_json_string(use_diff=False)
        if key not in made:
            made[key] = make(hf)
        return made[key]

    return make_once


vars(bridging)["make_reference"] = made_once(bridging.make_reference)  # it takes most of the time of a proof


def refusal(harness: MegatronHarness, path: Path) -> str:
    """Returns why the proof refuses the model, or an empty string."""
    start_anew(harness)
    changes = {"strategy": "megatron", "num_ranks": harness.world, "megatron": {"use_mbridge": True}}
    trainer = TrainerConfig.model_validate({**BASE, **changes})
    bridging._proven.clear()
    try:
        bridging.prove(read_config(str(path)), trainer, _CPU, key="trainer.megatron")
    except InvalidInput as error:
        assert error.metadata["field"] == "trainer.megatron.use_mbridge"
        return error.message
    return ""


def patched(target: str, change: str) -> Any:
    """Returns the patch of a mutant: `target` is MODULE:NAME, `change` the name of a function of this module."""
    module, _, name = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parts, last = name.split(".")
    owner = functools.reduce(getattr, parts, owner)
    return patch.object(owner, last, globals()[change](getattr(owner, last)))


def nothing(original: object) -> Any:
    return {}


def returning_nothing(original: object) -> Function:
    return lambda *args: {}


def of_another_rank(cut: Function) -> Function:
    return lambda self, weight, tensors, rank, size: cut(self, weight, tensors, size - 1 - rank, size)


def swapped(cut: Function) -> Function:
    """Reads up in the place of gate."""

    def changed(self: Any, weight: Any, tensors: Sequence[Any], rank: int, size: int) -> torch.Tensor:
        is_gated = "linear_fc1" in weight.parameter
        return cut(self, weight, tensors[::-1] if is_gated else tensors, rank, size)

    return changed


def reversed_shards(join: Function) -> Function:
    return lambda self, weight, shards: join(self, weight, shards[::-1])


def first_expert(name_of: Function) -> Function:
    """Counts experts from 0 on each rank."""
    return lambda name, layers, chunk, parallelism: name_of(
        name, layers, chunk, SimpleNamespace(expert_rank=0) if "experts" in name else parallelism
    )


def act(harness: MegatronHarness, directory: Path, work: Mapping[str, Any]) -> None:
    """Does the `work` of a test module on one rank; rank 0 writes the answers."""
    models = directory.parent / "models"
    answers: dict[str, dict[str, Any]] = {name: {} for name in work}
    for name, case in work["updates"].items():
        answers["updates"][name] = of_all_ranks(update(harness, *case, directory))
    for name, case in work["cases"].items():
        answers["cases"][name] = compare(harness, models, *case)
    answers["proofs"] = {kind: refusal(harness, models / kind) for kind in work["proofs"]}
    for name, (kind, megatron, target, change) in work["mutants"].items():
        with patched(target, change):
            is_proof = megatron is None
            answer = refusal(harness, models / kind) if is_proof else compare(harness, models, kind, megatron)
            answers["mutants"][name] = answer
    if harness.rank == 0:
        for name, content in answers.items():
            (directory / f"{name}.json").write_text(json.dumps(content))


def main(world: int, directory: Path, work: Mapping[str, Any]) -> int:
    return int(any(run_ranks(world, directory, functools.partial(act, directory=directory, work=work))))
