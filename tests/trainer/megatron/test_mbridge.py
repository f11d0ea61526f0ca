"""Tests mbridge as a second opinion on Lockstep's weight maps, and the trainer that builds models with it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.common.config.megatron import MegatronConfig
from services.common.config.trainer import TrainerConfig
from services.common.families.registry import FAMILIES, MBRIDGE_TYPES
from services.coordinator.fleet.probes import MODEL, problem
from services.trainer.compat.megatron.mbridge import registry
from services.trainer.proof import MOST_NATS
from tests.trainer.harness_processes import marked, run_harness, to_run
from tests.trainer.megatron.test_families import make_family
from tests.trainer.megatron_layouts import CP, EP, LAYOUTS, PP, TP, VPP

DENSE = ("llama", "llama-linear", "llama-llama3", "qwen2", "qwen2-tied", "qwen3")
EXPERTS = (
    "deepseek_v3",
    "deepseek_v3-yarn",
    "glm4_moe",
    "mixtral",
    "qwen2_moe",
    "qwen2_moe-normalized",
    "qwen3_moe",
    "qwen3_moe-unnormalized",
)
ETP1 = {"expert_tensor_parallel_size": 1}
ONE_BY_ONE = {"moe": {"grouped_gemm": False}}
# What decides which weights a rank has.
_SIZES = ("parallel_size", "sequence_parallel")

Case = tuple[str, Mapping[str, Any]]


def layouts() -> dict[str, tuple[int, dict[str, Any]]]:
    """Returns the world and the sizes of every layout of the matrix, each once, and of some that only weights need."""
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for name, layout in LAYOUTS.items():
        sizes = {key: value for key, value in layout.megatron.items() if key.endswith(_SIZES)}
        if (layout.world, sizes) not in found.values():
            found[name.partition("-")[2]] = layout.world, sizes
    found["one-by-one"] = 1, ONE_BY_ONE
    found["ep2-one-by-one"] = 2, EP | ONE_BY_ONE
    found["ep2-etp2-tp1"] = 4, EP | {"expert_tensor_parallel_size": 2}
    return found


def matrix() -> Iterator[tuple[str, int, Case]]:
    """Yields name, world and case of each family in each layout that it has."""
    for layout, (world, megatron) in layouts().items():
        has_experts = "expert" in str(megatron) or "grouped" in str(megatron)
        for kind in EXPERTS if has_experts else (*DENSE, *EXPERTS):
            if kind in DENSE or megatron.get("sequence_parallel") is not False:
                yield f"{kind} {layout}", world, (kind, megatron)


# Each family once, and each way to divide weights. The tied model comes first: mbridge would leave its class changed.
CASES: dict[str, Case] = {
    "qwen2-tied pp2": ("qwen2-tied", PP),
    "llama tp2": ("llama", TP),
    "qwen2 tp2": ("qwen2", TP),
    "qwen3 vpp2": ("qwen3", PP | VPP),
    "mixtral tp2-ep2-etp1": ("mixtral", TP | EP | ETP1),
    "qwen2_moe tp2": ("qwen2_moe", TP),
    "glm4_moe pp2": ("glm4_moe", PP),
    "deepseek_v3 tp2-ep2-etp1": ("deepseek_v3", TP | EP | ETP1),
    "qwen3_moe ep2": ("qwen3_moe", EP),
    "qwen3_moe ep2-one-by-one": ("qwen3_moe", EP | ONE_BY_ONE),
}
UPDATES: dict[str, Case] = {
    "qwen3 tp2": ("qwen3", TP),
    "qwen2-tied pp2": ("qwen2-tied", PP),
    "qwen3_moe cp2-ep2": ("qwen3_moe", CP | EP),  # with routed experts that are replayed
}
# Only make test-long runs these: test_every_family_in_every_layout has all, and the others see as much.
LONG = {"qwen2 tp2", "mixtral tp2-ep2-etp1", "qwen2_moe tp2", "qwen3_moe ep2", "qwen3 tp2"}
LONG |= {"experts of another rank", "Mixtral's router as mbridge has it", "Qwen3-MoE's router as mbridge has it"}
LONG |= {"no scaling of Llama 3", "mixtral", "qwen3_moe-unnormalized", "llama-llama3"}
_CORRECTIONS, _ROPE = "services.trainer.compat.megatron.mbridge:_CORRECTIONS", "services.trainer.megatron.mbridge:"
_MAP = "services.trainer.megatron.weights:"
# Name -> kind, sizes, what is changed and how. Those without sizes are for the proof.
MUTANTS: dict[str, tuple[str, Mapping[str, Any] | None, str, str]] = {
    "shards of another rank": ("llama", TP, f"{_MAP}WeightMap._cut", "of_another_rank"),
    "gate and up are swapped": ("qwen2_moe", EP, f"{_MAP}WeightMap._cut", "swapped"),
    "shards are joined in another order": ("qwen3", TP, f"{_MAP}WeightMap._join", "reversed_shards"),
    "experts of another rank": ("mixtral", EP, f"{_MAP}_global_name", "first_expert"),
    "GLM's router and shared experts as mbridge has them": ("glm4_moe", None, _CORRECTIONS, "nothing"),
    "Mixtral's router as mbridge has it": ("mixtral", None, _CORRECTIONS, "nothing"),
    "Qwen2-MoE's router and gate as mbridge has them": ("qwen2_moe", None, _CORRECTIONS, "nothing"),
    "Qwen3-MoE's router as mbridge has it": ("qwen3_moe-unnormalized", None, _CORRECTIONS, "nothing"),
    "no linear scaling": ("llama-linear", None, f"{_ROPE}rope_settings", "returning_nothing"),
    "no scaling of Llama 3": ("llama-llama3", None, f"{_ROPE}rope_settings", "returning_nothing"),
}
# An update proves its model too.
PROVEN = sorted({kind for kind, megatron, *_ in MUTANTS.values() if megatron is None})
Answers = dict[str, dict[str, Any]]


def compared(directory: Path, world: int, **work: Any) -> Answers:
    """Returns the answers of `world` ranks, whose models `models` has beside `directory`."""
    work = {"cases": {}, "updates": {}, "proofs": [], "mutants": {}} | work
    run_harness("mbridge_harness", directory, world, directory, work)
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in work}


def make_models(directory: Path) -> None:
    for kind in (*DENSE, *EXPERTS):  # with layers for two chunks on each of two stages
        make_family(directory / "models" / kind, kind, num_hidden_layers=4)


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    directory = tmp_path_factory.mktemp("mbridge")
    make_models(directory)
    cases, updates, mutants = (
        {name: every[name] for name in to_run(request, __file__, every, LONG)} for every in (CASES, UPDATES, MUTANTS)
    )
    proofs = to_run(request, __file__, PROVEN, LONG)
    return compared(directory / "world2", 2, cases=cases, updates=updates, proofs=proofs, mutants=mutants)


@pytest.mark.parametrize("case", marked(CASES, LONG))
def test_every_rank_holds_and_exports_what_mbridge_does(answers: Answers, case: str) -> None:
    """Tests weights, names and shapes to the bit, and the config of the model."""
    assert answers["cases"][case] == []


@pytest.mark.parametrize("case", marked(UPDATES, LONG))
def test_an_update_with_mbridge_is_the_same_to_the_bit(answers: Answers, case: str) -> None:
    """Tests weights, publication, log-probabilities, metrics, and a checkpoint that is loaded without mbridge."""
    assert answers["updates"][case] == []


@pytest.mark.parametrize("kind", marked(PROVEN, LONG))
def test_proof_passes(answers: Answers, kind: str) -> None:
    assert answers["proofs"][kind] == ""


@pytest.mark.parametrize("mutant", marked([name for name, mutant in MUTANTS.items() if mutant[1] is not None], LONG))
def test_comparison_sees_a_mistake(answers: Answers, mutant: str) -> None:
    assert any("differs" in problem for problem in answers["mutants"][mutant])


@pytest.mark.parametrize("mutant", marked([name for name, mutant in MUTANTS.items() if mutant[1] is None], LONG))
def test_proof_refuses_what_mbridge_has_wrong(answers: Answers, mutant: str) -> None:
    refusal = answers["mutants"][mutant]
    assert refusal.startswith("trainer.megatron.use_mbridge: with mbridge a small model of model_type ")
    if "differ from those of transformers" in refusal:
        assert float(refusal.partition(" by up to ")[2].partition(" ")[0]) > 10 * MOST_NATS


def test_types_are_those_that_both_know() -> None:
    assert set(MBRIDGE_TYPES) == registry().keys() & FAMILIES.keys()


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_family_in_every_layout(tmp_path: Path, world: int) -> None:
    make_models(tmp_path)
    cases = {name: case for name, of_world, case in matrix() if of_world == world}
    assert {case[0] for case in cases.values()} == {*DENSE, *EXPERTS}
    kinds = [*DENSE, *EXPERTS]
    answers = compared(tmp_path / f"world{world}", world, cases=cases, proofs=kinds if world == 1 else [])
    assert answers["cases"] == {name: [] for name in cases}
    assert answers["proofs"] == (dict.fromkeys(kinds, "") if world == 1 else {})


@pytest.mark.long
def test_doctor_asks_the_trainer(tmp_path: Path) -> None:
    """Tests the proof in a process of its own, which is no rank."""
    make_family(tmp_path, "qwen3")
    for megatron, words in (({}, ""), ({"transformer_config_kwargs": {"rotary_interleaved": True}}, "differ from")):
        config = TrainerConfig(strategy="megatron", num_ranks=2, megatron=MegatronConfig(use_mbridge=True, **megatron))
        request = {"model": str(tmp_path), "config": config.model_dump_json()}
        why = problem(MODEL, request, 300)
        assert words in why if words else not why
