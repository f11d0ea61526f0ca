"""Tests that a Megatron checkpoint resumes where it was saved, in its own layout and in others."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from services.trainer.checkpoint import manifest as checkpoint
from tests.support import make_model
from tests.trainer.fsdp_harness import read
from tests.trainer.harness_processes import marked, pairs_of, start_harness, to_run
from tests.trainer.megatron.test_families import make_family
from tests.trainer.megatron_checkpoint_harness import BATCH_BYTES, LONG_PAIRS, PAIRS, REFUSED, SAME, STAGED

KINDS = ("untied", "tied", "moe", "deep", "qwen2_moe", "gpt_oss")
TOLERANCE = 1e-5
"""Absolute for weights of size 0.1 to 1 and losses of size 1, relative for gradient norms. Layouts add up in other
orders, which is measured at 3e-7; an update changes weights by 1e-2, so an optimizer that begins anew is 1e-3 off."""


ALL = [*PAIRS, *((name, name) for name in (*SAME, "tp2-async")), *REFUSED]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs megatron_checkpoint_harness, whose ranks are all killed; returns the directory of their results."""
    directory = tmp_path_factory.mktemp("megatron_checkpoint")
    for kind in KINDS:
        make_model(directory / "models" / kind, kind)
    make_family(directory / "models" / "deepseek_v3", "deepseek_v3")
    config = Qwen3MoeConfig.from_pretrained(directory / "models" / "moe")
    config.num_experts = 8
    Qwen3MoeForCausalLM(config).save_pretrained(directory / "models" / "moe8")
    out = directory / "out"
    harness = start_harness("megatron_checkpoint_harness", out, to_run(request, __file__, ALL, LONG_PAIRS))
    try:
        harness.join(300)
    finally:
        left = session_of(harness.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        harness.join()
    assert harness.exitcode == 0, "".join(file.read_text() for file in out.glob("*.error"))
    assert left == [], "processes outlived the ranks"
    return out


def session_of(leader: int) -> list[int]:
    """Returns the living processes of the session of `leader`."""
    children = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):
            state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(session) == leader and state != "Z":
                children.append(int(entry.name))
    return children


@pytest.mark.parametrize(("saved", "loaded"), pairs_of(PAIRS, LONG_PAIRS))
def test_another_layout_goes_on_with_the_same_numbers(results: Path, saved: str, loaded: str) -> None:
    want, want_metrics = read(results, f"{saved} went on")
    weights, metrics = read(results, f"{saved} to {loaded}")
    assert weights.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=TOLERANCE, msg=name)
    assert metrics["grad_norm"] == pytest.approx(want_metrics["grad_norm"], rel=TOLERANCE)
    assert metrics["loss"] == pytest.approx(want_metrics["loss"], abs=TOLERANCE)


@pytest.mark.parametrize(
    "name", marked([*SAME, "tp2-async"], [saved for saved, loaded in LONG_PAIRS if saved == loaded])
)
def test_the_same_layout_goes_on_bit_by_bit(results: Path, name: str) -> None:
    want, want_metrics = read(results, f"{name} went on")
    weights, metrics = read(results, f"{name} to {name}")
    assert weights.keys() == want.keys()
    assert [key for key in want if not torch.equal(weights[key], want[key])] == []
    assert metrics == want_metrics


def test_the_update_after_the_checkpoint_is_far_above_the_tolerance(results: Path) -> None:
    after_two, _ = read(results, "tp2 went on")
    after_none, _ = read(results, "plain")
    assert max(float((after_two[key] - after_none[key]).abs().max()) for key in after_two) > 100 * TOLERANCE


@pytest.mark.parametrize(("saved", "loaded"), pairs_of(REFUSED, LONG_PAIRS))
def test_what_does_not_fit_is_refused_and_changes_nothing(results: Path, saved: str, loaded: str) -> None:
    answer = json.loads((results / f"{saved} to {loaded}.json").read_text())
    kind, message = answer["error"]
    assert answer["unchanged"]
    words = {
        "dp2-buckets": ("PreconditionFailed", ["TP1 PP1", "dp_reshardable", "nothing but DP differs"]),
        "lora-tp2": ("PreconditionFailed", ["adapters of rank 4", "lora.rank"]),
    }
    by_target = {
        "lora-tp2": ("PreconditionFailed", ["adapters of rank 4", "lora.rank"]),
        "tied-pp2": ("InvalidInput", ["output_layer.weight is not in this model"]),
        "deep-1": ("InvalidInput", ["no tensor decoder.layers.2.", "61 more"]),
        "moe-1": ("PreconditionFailed", ["qwen3 on", "qwen3_moe on"]),
    }
    want_kind, want_words = words.get(saved) or by_target[loaded]
    assert kind == want_kind
    assert [word for word in want_words if word not in message] == []


def test_a_checkpoint_has_only_tensors_and_says_what_it_was_saved_under(results: Path) -> None:
    path = results / "checkpoints" / "tp2-dp2"
    assert checkpoint.verify(path).version == 1
    layout = json.loads((path / "state" / "layout.json").read_text())
    assert layout["num_updates"] == 1
    assert layout["layout"]["num_ranks"] == 4
    assert layout["layout"]["sizes"] == {"TP": 2, "PP": 1, "VPP": 1, "CP": 1, "EP": 1, "ETP": 2}
    assert torch.load(path / "state" / "common.pt", weights_only=True) == {}


def test_norms_before_experts_have_the_names_that_they_have_on_gpus(results: Path) -> None:
    # Megatron's layers of TransformerEngine keep this norm apart.
    reader = FileSystemReader(results / "checkpoints" / "moe-ep2-etp2" / "state")
    saved = reader.read_metadata().state_dict_metadata
    name = "decoder.layers.0.pre_mlp_layernorm.weight"
    assert name in saved and f"optimizer.state.param.{name}" in saved
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" not in saved


def test_adapters_are_saved_without_the_base(results: Path) -> None:
    whole, adapters = (
        sum(file.stat().st_size for file in (results / "checkpoints" / name / "state").glob("*.distcp"))
        for name in ("tp2", "lora-tp2")
    )
    assert adapters < whole / 3


def test_a_save_in_the_background_has_the_weights_from_before_the_update(results: Path) -> None:
    # test_the_same_layout_goes_on_bit_by_bit checks that its weights are those from before the update.
    answer = json.loads((results / "background.json").read_text())
    assert not answer["is_early"]  # it was not there when the next update was done
    assert checkpoint.verify(results / "checkpoints" / "tp2-async").version == 1
    assert len(answer["saved"]["manifest_digest"]) == 64
    assert answer["children"] == []


@pytest.mark.parametrize("name", STAGED)
def test_what_is_written_in_the_background_is_copied_once(results: Path, name: str) -> None:
    answer = json.loads((results / "staged.json").read_text())[name]
    assert answer["alive"] == []  # the next update changes nothing of it
    assert answer["num_optimizer"] > 30
    is_gathered = name == "dp2-async"
    assert answer["num_as_made"] == (answer["num_optimizer"] if is_gathered else 0)


def test_a_rank_reads_the_optimizer_state_of_its_shard_in_batches(results: Path) -> None:
    ranks = json.loads((results / "read.json").read_text())
    whole, largest = ranks[0]["whole"], ranks[0]["largest"]
    for rank in ranks:
        assert sum(rank["rounds"]) < whole / 2 + largest
        assert len(rank["rounds"]) > 2
        assert max(rank["rounds"]) <= max(BATCH_BYTES, largest) < whole / 4
    # Every parameter is read, and only the one that lies in both shards is read by both ranks.
    assert whole <= sum(sum(rank["rounds"]) for rank in ranks) <= whole + largest


def test_optimizer_state_that_one_rank_misses_is_refused_on_all(results: Path) -> None:
    for rank in json.loads((results / "read.json").read_text()):
        kind, message = rank["error"]
        assert kind == "InvalidInput"
        assert "no tensor exp_avg.elsewhere; no tensor exp_avg_sq.elsewhere; no tensor param.elsewhere" in message


def test_a_save_that_cannot_be_written_is_an_error_and_the_next_one_works(results: Path) -> None:
    kind, message = json.loads((results / "background.json").read_text())["error"]
    assert kind == "InternalError"
    assert "blocked" in message and "FileExistsError" in message
    assert checkpoint.verify(results / "checkpoints" / "blocked").version == 3


@pytest.mark.parametrize(
    ("converted", "original"), [("dp2", "dp2 weights"), ("plain", "plain"), ("moe-ep2-etp2", "moe-ep2-etp2 weights")]
)
def test_a_run_starts_from_converted_weights(results: Path, converted: str, original: str) -> None:
    want, _ = read(results, original)
    weights, _ = read(results, f"converted {converted}")
    assert weights.keys() == want.keys()
    assert [key for key in want if not torch.equal(weights[key], want[key])] == []


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "experts": ["router.weight is [4, 64] there and [8, 64] here", "nothing was loaded"],
        "dense": ["mlp.experts.experts.linear_fc1.weight", "no tensor decoder.layers.0"],
        "deep": ["decoder.layers.2.", "is not in this model"],
        "nothing": ["is not a torch_dist checkpoint"],
        "changed": ["is not the file that was written"],
    }.items(),
)
def test_converted_weights_of_another_model_are_refused(results: Path, name: str, words: list[str]) -> None:
    kind, message = json.loads((results / "converted.json").read_text())[name]
    assert kind == "InvalidInput"
    assert [word for word in ["dist_checkpointing_path", *words] if word not in message] == []
