"""Tests adapters: they are the same in every layout and on both backends, and nothing else changes.

The adapters that are exported for PEFT make the same model.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from services.common.errors import InvalidInput, Reason
from services.trainer.backend import Role
from services.trainer.compat.megatron.state import rng_tracker
from tests.support import make_model, raises
from tests.trainer import plain_grpo
from tests.trainer.fsdp_harness import TEMPERATURE, read, samples
from tests.trainer.harness_processes import marked, run_harness, to_run
from tests.trainer.lora_engine import PROMPTS
from tests.trainer.lora_harness import ALPHA, LAYOUTS, LOADS, LONG, RANK
from tests.trainer.megatron_harness import MegatronHarness, config
from tests.trainer.megatron_layouts import Layout

# Each is a float32 sum over some 100 tokens in another order, which is off by 2^-24 = 6e-8 of its largest term, and
# there are two updates.
TOLERANCE = 1e-5
# Where a gradient is small against Adam's eps, its rounding of 2e-8 comes back lr / eps = 10 times as large in each
# update, and B has entries of only 0.02: 2 x 2e-7 / 0.02. Merged weights are 50 times as large as the adapters' part.
ADAPTER_TOLERANCE, MERGED_TOLERANCE = 3e-5, 1e-6
GROUPS = ("untied-lora", "untied-canonical", "tied-canonical", "moe-lora", "some", "deep-lora")
GROUPS += ("phi3-lora", "qwen2_moe-canonical", "deepseek_v3-lora")
SPLITS = [
    name
    for name in LAYOUTS
    for group in GROUPS
    if name.startswith(group + "-") and (LAYOUTS[name].world > 1 or name == f"{group}-fsdp1")
]


def one_of(name: str) -> str:
    """Returns the layout of one rank that is compared with the layout `name`."""
    return next(f"{group}-1" for group in GROUPS if name.startswith(group + "-"))


STRATEGIES = pytest.mark.parametrize("strategy", ["megatron", "fsdp"])


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora")
    for kind in ("untied", "tied", "moe", "deep", "phi3", "qwen2_moe", "deepseek_v3"):
        make_model(directory / "models" / kind, kind)
    out = directory / "out"
    out.mkdir()
    run_harness("lora_harness", out, out, to_run(request, __file__, LAYOUTS, LONG))
    return out


@pytest.fixture(scope="session")
def rank(results: Path) -> Iterator[MegatronHarness]:
    harness = MegatronHarness(dist.HashStore(), 0, 1, results.parent / "models")
    yield harness
    harness.worker.close()


def part(results: Path, name: str, which: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of "merged", "base" or "adapter" from NAME-before or NAME-after."""
    tensors, _ = read(results, name)
    return {key.removeprefix(f"{which}/"): value for key, value in tensors.items() if key.startswith(f"{which}/")}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        gap = (got[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp_min(1e-12)
        assert gap <= tolerance, f"{name}: {gap:.3g}"


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("name", marked(LAYOUTS, LONG))
def test_published_weights_are_the_merged_ones(results: Path, name: str) -> None:
    assert read(results, name)[1]["sends_merged"]


@pytest.mark.parametrize("name", marked(SPLITS, [name for name in SPLITS if name in LONG or one_of(name) in LONG]))
def test_training_is_the_same_in_every_layout(results: Path, name: str) -> None:
    one = one_of(name)
    _, got = read(results, name)
    _, want = read(results, one)
    assert got["copies_agree"]
    for mine, theirs in zip(got["updates"], want["updates"], strict=True):
        for metric in ("loss", "grad_norm"):
            assert mine[metric] == pytest.approx(theirs[metric], rel=TOLERANCE, abs=TOLERANCE), metric
    assert_same(part(results, f"{name}-before", "adapter"), part(results, f"{one}-before", "adapter"))
    # The gradient of a latent query passes through two more products, each with a rounding of its own.
    adapter_tolerance = 2 * ADAPTER_TOLERANCE if name.startswith("deepseek_v3") else ADAPTER_TOLERANCE
    for which, tolerance in (("adapter", adapter_tolerance), ("merged", MERGED_TOLERANCE)):
        assert_close(part(results, f"{name}-after", which), part(results, f"{one}-after", which), tolerance)


@pytest.mark.parametrize("name", marked(LAYOUTS, LONG))
def test_only_adapters_are_trained(results: Path, name: str) -> None:
    before, after = part(results, f"{name}-before", "base"), part(results, f"{name}-after", "base")
    assert_same(after, before)
    assert_same(part(results, f"{name}-before", "merged"), before)
    adapters = part(results, f"{name}-before", "adapter"), part(results, f"{name}-after", "adapter")
    assert all((tensor == 0).all() == (".lora_B." in key) for key, tensor in adapters[0].items())
    assert all(not torch.equal(adapters[1][key], tensor) for key, tensor in adapters[0].items())


@pytest.mark.parametrize("name", marked([name for name in LAYOUTS if not name.startswith("bfloat16")], LONG))
def test_base_and_adapter_are_the_merged_weights(results: Path, name: str) -> None:
    base, merged = part(results, f"{name}-after", "base"), part(results, f"{name}-after", "merged")
    adapter = part(results, f"{name}-after", "adapter")
    for key in base:
        a = adapter.get(f"base_model.model.{key.removesuffix('.weight')}.lora_A.weight")
        b = adapter.get(f"base_model.model.{key.removesuffix('.weight')}.lora_B.weight")
        assert (a is None) == (b is None)
        want = base[key].double() + (0 if a is None else ALPHA / RANK * b.double() @ a.double())
        # The product and the sum are rounded once each, by 2^-24 of entries of size 1.
        torch.testing.assert_close(merged[key].double(), want, rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    ("name", "projections"),
    [
        ("untied-lora-1", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("tied-canonical-tp2-pp2", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("moe-lora-tp2", "q_proj k_proj v_proj o_proj"),
        ("some-pp2", "q_proj v_proj up_proj"),
        ("some-fsdp2", "q_proj v_proj up_proj"),
    ],
)
def test_targets(results: Path, name: str, projections: str) -> None:
    adapter = part(results, f"{name}-after", "adapter")
    layers = {(key.split(".")[4], key.split(".")[6]) for key in adapter}
    wanted = {(layer, projection) for layer in "01" for projection in projections.split()}
    if name.startswith("some"):
        wanted -= {("0", "up_proj")}
    assert layers == wanted
    assert len(adapter) == 2 * len(wanted)
    q, v = (adapter[f"base_model.model.model.layers.1.self_attn.{part}_proj.lora_A.weight"] for part in "qv")
    assert torch.equal(q, v) == ("lora" in name)


EXPORTS = ["untied-lora-1", "tied-canonical-tp2-pp2", "moe-lora-tp2", "some-pp2", "bfloat16-1", "some-fsdp2"]


@pytest.mark.parametrize("name", marked(EXPORTS, LONG))
def test_export_holds_the_merged_model_and_the_adapter(results: Path, name: str) -> None:
    export = results / f"{name}-export"
    assert_same(load_file(export / "model-00001.safetensors"), part(results, f"{name}-after", "merged"))
    adapter = part(results, f"{name}-after", "adapter")
    assert_same(load_file(export / "adapter" / "adapter_model.safetensors"), adapter)
    config = json.loads((export / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert set(config["target_modules"]) == {key[len("base_model.model.") : -len(".lora_A.weight")] for key in adapter}


FORWARDS = ["untied-lora-1", "tied-canonical-tp2-pp2", "moe-lora-tp2", "some-pp2", "deep-lora-vpp2", "dropout-tp2"]
FORWARDS += [
    "phi3-lora-tp2",
    "qwen2_moe-canonical-tp2",
    "deepseek_v3-lora-tp2",
    "untied-lora-fsdp2",
    "moe-lora-fsdp1",
    "phi3-lora-fsdp1",
]


@pytest.mark.parametrize("name", marked(FORWARDS, LONG))
def test_adapted_forward_is_that_of_the_merged_export(results: Path, name: str) -> None:
    """Compares transformers, which runs the exported model, with the trainer, which ran base and adapters apart."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(results / f"{name}-export", dtype=torch.float32)
    _assert_logprobs(model, read(results, f"{name}-after")[1]["logprobs"])


@pytest.mark.parametrize("name", ["untied-lora-1", "tied-canonical-tp2-pp2", "moe-lora-tp2", "some-pp2"])
def test_peft_loads_the_exported_adapter(results: Path, name: str) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(results.parent / "models" / LAYOUTS[name].kind, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, results / f"{name}-export" / "adapter")
    _assert_logprobs(model, read(results, f"{name}-after")[1]["logprobs"])


@pytest.mark.parametrize("name", marked(LOADS, LONG))
def test_a_checkpoint_loads_in_another_layout(results: Path, name: str) -> None:
    saved = LOADS[name]
    for which in ("adapter", "base"):
        assert_same(part(results, f"{name}-loaded", which), part(results, f"{saved}-after", which))


@pytest.mark.parametrize(
    "names", [["untied-lora-1"], pytest.param(["some-pp2", "untied-canonical-tp2"], marks=pytest.mark.long)]
)
def test_vllm_serves_the_exported_adapter(results: Path, names: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    out, base = results / "engine.json", results.parent / "models" / "untied"
    adapters = [str(results / f"{name}-export" / "adapter") for name in names]
    subprocess.run([sys.executable, "-m", "tests.trainer.lora_engine", str(out), str(base), *adapters], check=True)
    exports = [*(results / f"{name}-export" for name in names), base]
    for export, completions in zip(exports, json.loads(out.read_text()), strict=True):
        model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            row = {"prompt_tokens": prompt, "tokens": completion["tokens"]}
            with torch.no_grad():
                want, _ = plain_grpo.score(model, row, 1.0)
            # These are two implementations of a float32 forward; adapters move its log-probabilities by 0.1 and more.
            np.testing.assert_allclose(completion["logprobs"], want.numpy(), rtol=0, atol=1e-4)


def _assert_logprobs(model: torch.nn.Module, got: list[list[float]]) -> None:
    for row, values in zip(samples().to_pylist(), got, strict=True):
        with torch.no_grad():
            want, _ = plain_grpo.score(model, row, TEMPERATURE)
        np.testing.assert_allclose(values, want.numpy(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["reference-1", "reference-fsdp1"])
def test_reference_is_the_base(results: Path, name: str) -> None:
    _, before = read(results, f"{name}-before")
    _, after = read(results, f"{name}-after")
    assert read(results, name)[1]["reference"] == before["logprobs"]
    assert after["logprobs"] != before["logprobs"]


RECOMPUTED = ["untied-lora-1", "untied-lora-tp2", "dropout-1"]


@pytest.mark.parametrize("name", marked(RECOMPUTED, [name for name in RECOMPUTED if f"{name}-recompute" in LONG]))
def test_recomputed_activations_give_the_same_updates(results: Path, name: str) -> None:
    # With dropout, masks in the backward that are not those of the forward would change gradients by their own size.
    got, want = part(results, f"{name}-recompute-after", "adapter"), part(results, f"{name}-after", "adapter")
    assert_close(got, want, ADAPTER_TOLERANCE)
    assert read(results, f"{name}-recompute")[1]["updates"][0]["loss"] == read(results, name)[1]["updates"][0]["loss"]


@pytest.mark.parametrize("name", marked(["dropout-1", "dropout-tp2", "dropout-tp2-plain"], LONG))
def test_dropout_is_for_training_only(results: Path, name: str) -> None:
    plain = name.replace("dropout", "untied-lora").removesuffix("-plain")
    # test_adapted_forward_is_that_of_the_merged_export compares the forward after training, too.
    with pytest.raises(AssertionError):
        assert_close(part(results, f"{name}-after", "adapter"), part(results, f"{plain}-after", "adapter"), 0.01)


@pytest.mark.parametrize(
    ("name", "same_input"),
    [pytest.param("dropout-tp2", [], marks=pytest.mark.long), ("dropout-tp2-plain", ["linear_qkv"])],
)
def test_ranks_with_the_same_input_drop_the_same(results: Path, name: str, same_input: list[str]) -> None:
    _, answers = read(results, name)
    assert answers["copies_agree"]
    assert [layer for layer, is_same in answers["masks_agree"].items() if is_same] == same_input


@pytest.mark.parametrize(
    ("lora", "field", "problem"),
    [
        ({"target_modules": ["linear_q"]}, "target_modules", "only linear_qkv, linear_proj, linear_fc1, linear_fc2"),
        (
            {"kind": "canonical_lora", "target_modules": ["linear_qkv"]},
            "target_modules",
            "linear_q, linear_k, linear_v",
        ),
        ({"exclude_modules": ["*.mlp.linear_q"]}, "exclude_modules", "decoder.layers.0.mlp.linear_fc1"),
        ({"exclude_modules": ["*"]}, "lora", "nothing to train"),
    ],
)
@STRATEGIES
def test_a_wrong_setting_is_refused(rank: MegatronHarness, strategy: str, lora: dict, field: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        rank.open(Layout("untied", 1, {}, {"lora": {"rank": RANK, **lora}, "strategy": strategy}))
    assert caught.value.metadata["field"].endswith(field)


def test_the_expert_that_computes_every_token_has_adapters(results: Path) -> None:
    names = part(results, "qwen2_moe-canonical-tp2-after", "adapter")
    prefix = "base_model.model.model.layers.1.mlp"
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        assert {f"{prefix}.shared_expert.{matrix}.lora_{ab}.weight" for ab in "AB"} <= names.keys()
    assert not any(".mlp.experts." in name for name in names)


@STRATEGIES
def test_one_part_of_a_matrix_that_checkpoints_have_whole_is_refused(rank: MegatronHarness, strategy: str) -> None:
    changes = {"lora": {"rank": RANK, "kind": "canonical_lora"}, "strategy": strategy}
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="lora.kind"):
        rank.open(Layout("phi3", 1, {}, changes))


def test_all_matrices_of_latent_attention_have_adapters(results: Path) -> None:
    names = part(results, "deepseek_v3-lora-tp2-after", "adapter")
    for matrix in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        assert {f"base_model.model.model.layers.1.self_attn.{matrix}.lora_{ab}.weight" for ab in "AB"} <= names.keys()


@STRATEGIES
def test_adapters_that_the_engine_would_not_add_to_latent_attention_are_refused(
    rank: MegatronHarness, strategy: str
) -> None:
    changes = {"lora": {"rank": RANK, "publish": "adapter"}, "strategy": strategy}
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="trainer.lora.publish"):
        rank.open(Layout("deepseek_v3", 1, {}, changes))


@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
def test_a_role_that_is_opened_later_changes_no_dropout_of_the_policy(rank: MegatronHarness, strategy: str) -> None:
    layout = Layout("untied", 1, {}, {"lora": {"rank": RANK, "dropout": 0.5}, "strategy": "megatron"})
    rank.open(layout)
    torch.rand(7)  # as a checkpoint that was read, whose generators are not where they begin
    with rng_tracker().fork():
        torch.rand(7)
    before = torch.get_rng_state(), rng_tracker().get_states()
    rank.open_role(Role.REFERENCE, "untied", config(Layout("untied", 1, {}, {"strategy": strategy})))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(state, before[1][name]) for name, state in rng_tracker().get_states().items())


@STRATEGIES
def test_a_model_without_a_target_is_refused(rank: MegatronHarness, strategy: str) -> None:
    lora = {"rank": RANK, "target_modules": ["linear_fc1", "linear_fc2"]}
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="trainer.lora"):
        rank.open(Layout("moe", 1, {}, {"lora": lora, "strategy": strategy}))
