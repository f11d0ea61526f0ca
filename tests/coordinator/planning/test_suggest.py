"""Placements for GPUs at hand, and the memory of shared ones, against sums done by hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.common.config.load import load
from services.common.config.operation import BUCKET_BYTES
from services.common.config.run import Config
from services.common.errors import InvalidInput, NotFound, Reason, Unavailable
from services.coordinator.cli.main import app
from services.coordinator.clients.gpus import Gpu, read_gpus
from services.coordinator.planning.plan import check_model
from services.coordinator.planning.suggest import parse_gpus, search
from tests.support import raises

GIB = 1 << 30
# Qwen3-8B.
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
NUM_WEIGHTS = 8_190_735_360
EMBEDDING = 151936 * 4096


@pytest.fixture
def args(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    tree = {
        "model": str(tmp_path),
        "data": {"train": "a.parquet", "prompts_per_step": 64},
        "reward": {"scorers": [{"kind": "exact"}]},
        "trainer": {"strategy": "megatron", "gradient_checkpointing": True},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    return [str(tmp_path / "run.yaml")]


def output(*command: str) -> str:
    result = CliRunner().invoke(app, ["plan", *command], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


def test_plan_of_shared_gpus_has_every_phase(args: list[str]):
    sizes = ("trainer.num_ranks=8", "rollout.num_replicas=4", "rollout.tensor_parallel_size=2")
    text = output(*args, "placement=colocated", *sizes, "--device", "gpu")
    rows = {
        line.split()[0]: [float(cell) for cell in line.split()[1:]]
        for line in text.splitlines()
        if line.strip().startswith(("generate ", "train ", "publish "))
    }
    assert rows["generate"] == pytest.approx([0, NUM_WEIGHTS / GIB, NUM_WEIGHTS / GIB], abs=0.01)  # bfloat16, TP 2
    layer_inputs = 36 * 16384 * 2 * 4096
    logits = 4 * 256 * 2**20 + 4 * EMBEDDING  # of a part of the tokens, with the gradient of the output layer
    train = NUM_WEIGHTS * (2 + 4 + 12 / 8) + layer_inputs + logits
    assert rows["train"][0] == rows["train"][2] == pytest.approx(train / GIB, rel=0.01)
    publish = 2 * NUM_WEIGHTS + 2 * BUCKET_BYTES["colocated"]
    assert rows["publish"] == pytest.approx([publish / GIB, NUM_WEIGHTS / GIB, (publish + NUM_WEIGHTS) / GIB], abs=0.01)
    pinned = NUM_WEIGHTS * (2 + 12 / 8) / GIB
    assert f"Pinned host memory: {pinned:.2f} GiB for each of 8 ranks" in text
    assert "Memory of a shared GPU" not in output(*args, "trainer.num_ranks=8", "--device", "gpu")


@pytest.mark.parametrize(
    ("gpus", "first"),
    [
        ("1x79", None),  # weights, gradients and moments need 137 GiB
        ("8x79", "placement=colocated trainer.num_ranks=8 rollout.num_replicas=8 rollout.tensor_parallel_size=1"),
    ],
)
def test_what_fits_is_suggested(args: list[str], gpus: str, first: str | None):
    if first is None:
        with pytest.raises(InvalidInput, match="no placement fits 1 GPU of 79 GiB"):
            CliRunner().invoke(app, ["plan", *args, "--gpus", gpus], catch_exceptions=False)
        return
    text = output(*args, "--gpus", gpus)
    assert text.splitlines()[-1].strip() == f"lockstep run {args[0]} {first}"
    output(*args, *first.split())


def test_a_model_on_the_hub_is_sized_and_the_command_can_be_pasted(args: list[str], monkeypatch: pytest.MonkeyPatch):
    directory, asked = str(Path(args[0]).parent), list[str]()

    def local_model(model: str, **_: object) -> str:
        asked.append(model)
        return directory if model == "owner/name" else model

    monkeypatch.setattr("services.coordinator.data.reading.hub.local_model", local_model)
    kl = ("trainer.loss.kl_coef=0.1", "reference.model=owner/name")
    given = ("model=owner/name", *kl, "runs_dir=a b", "trainer.num_ranks=3")  # the last is replaced
    suggested = output(*args, *given, "--gpus", "8x200").splitlines()[-1].strip()
    assert suggested.startswith(f"lockstep run {args[0]} model=owner/name {' '.join(kl)} 'runs_dir=a b' placement=")
    assert suggested.count("trainer.num_ranks=") == 1
    assert asked == ["owner/name", "owner/name"]


def test_a_proposal_is_a_config_that_fits_and_the_next_bigger_need_is_none(args: list[str]):
    def fitting(gib: int, *more: str) -> list[Any]:
        return [proposal.overrides for proposal in search([*args, *more], [gib * GIB] * 8).fitting]

    whole = fitting(79)
    assert {overrides[0] for overrides in whole} == {"placement=colocated"}  # four ranks of their own would not fit
    assert fitting(200)[0] == whole[0] and len(fitting(200)) > len(whole)
    assert not fitting(40)
    assert all("trainer.num_ranks=8" in overrides for overrides in whole)
    own = fitting(200, "trainer.loss.kl_coef=0.1", "reference.deployment=own", "reference.num_ranks=2")
    assert own and all("placement=disaggregated" in overrides for overrides in own)
    assert own[0][1:] == ["trainer.num_ranks=2", "rollout.num_replicas=4", "rollout.tensor_parallel_size=1"]


def test_engines_whose_cache_holds_the_samples_come_first(args: list[str]):
    """On a GPU of 40 GiB the KV cache of one engine has room for 24 samples of 4096 tokens; with TP 2, for 76."""

    def sizes(max_samples: int) -> list[int]:
        found = search([*args, "trainer.lora.rank=8", f"rollout.max_samples={max_samples}"], [40 * GIB] * 8).fitting
        shared = [proposal.overrides[-1] for proposal in found if "placement=colocated" in proposal.overrides]
        return [int(override.rpartition("=")[2]) for override in shared]

    assert sizes(48) == [1, 2, 4, 8]  # room for half of the samples is enough
    assert sizes(64) == [2, 4, 8, 1]


def test_a_placement_that_a_rule_refuses_is_not_said_to_be_too_large(args: list[str]):
    def refused(*more: str) -> str:
        return str(CliRunner().invoke(app, ["plan", *args, *more]).exception)

    lag = ("trainer.lag.versions=1", "trainer.loss.old_logprobs=engine")
    message = refused(*lag, "--gpus", "1x500")
    assert "no placement fits 1 GPU of 500 GiB; not possible, whatever the memory: placement=colocated" in message
    assert "set trainer.lag.versions 0, placement disaggregated, or" in message
    assert "placement=disaggregated: it needs at least 2 GPUs" in message and "lower" not in message
    message = refused(*lag, "--gpus", "2x20")
    assert "lower trainer.max_tokens_per_microbatch" in message and "set trainer.lag.versions 0" in message
    message = refused("--gpus", "8x20")
    assert (
        "; not possible" not in message
        and "training takes 65.3 GiB of each GPU or more" in message
        and "trainer.lora.rank" in message
    )


@pytest.mark.parametrize(
    ("heads", "wrong", "legal"),
    [
        (
            {"num_attention_heads": 28, "num_key_value_heads": 4},
            8,
            "num_attention_heads 28 must divide by it; .* 4 or 28",
        ),
        ({"num_attention_heads": 24, "num_key_value_heads": 4}, 6, "num_key_value_heads 4 must be .* 4 or 8"),
    ],
)
def test_an_engine_that_cannot_cut_the_heads_is_refused_and_not_suggested(
    args: list[str], heads: dict[str, int], wrong: int, legal: str
):
    directory = Path(args[0]).parent
    for content in (SHAPE | heads, {"model_type": "gemma3", "text_config": SHAPE | heads}):
        (directory / "config.json").write_text(json.dumps(content))
        config = load(Config, [*args, "trainer.strategy=fsdp", f"rollout.tensor_parallel_size={wrong}"])
        with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="rollout.tensor_parallel_size") as caught:
            check_model(config)
        assert re.search(legal, caught.value.message)
    (directory / "config.json").write_text(json.dumps(SHAPE | heads))
    found = search([*args, "trainer.lora.rank=8", "rollout.max_samples=512"], [40 * GIB] * 8)
    sizes = {override for proposal in found.legal for override in proposal.overrides if "parallel" in override}
    assert "rollout.tensor_parallel_size=4" in sizes and f"rollout.tensor_parallel_size={wrong}" not in sizes


def test_activations_are_recomputed_where_nothing_fits_without(args: list[str]):
    found = search([*args, "trainer.gradient_checkpointing=false"], [79 * GIB] * 8).fitting
    assert found and all("trainer.gradient_checkpointing=true" in proposal.overrides for proposal in found)


def test_wrong_gpus_and_wrong_configs_are_named(args: list[str]):
    assert parse_gpus("2x79.5") == [int(79.5 * GIB)] * 2
    for text in ("8", "x80", "0x80", "8x", "8xA100"):
        with raises(InvalidInput, field="--gpus"):
            parse_gpus(text)
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="trainer.num_rankz"):
        search([*args, "trainer.num_rankz=1"], [79 * GIB])


def test_a_host_without_gpus_is_told_to_name_others(args: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.coordinator.clients.gpus.visible_gpus", list)
    with raises(InvalidInput, field="--gpus"):
        CliRunner().invoke(app, ["plan", *args, "--suggest"], catch_exceptions=False)


def test_gpus_are_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = "0, GPU-aaaa-1, 81559, 81000\n1, GPU-bbbb-2, 81559, 500\n"
    monkeypatch.setattr("services.coordinator.clients.gpus.visible_gpus", lambda: ["0", "1"])
    assert read_gpus(["printf", lines]) == [
        Gpu("0", "GPU-aaaa-1", 81559 << 20, 81000 << 20),
        Gpu("1", "GPU-bbbb-2", 81559 << 20, 500 << 20),
    ]
    monkeypatch.setattr("services.coordinator.clients.gpus.visible_gpus", lambda: ["GPU-bbbb"])
    assert [gpu.index for gpu in read_gpus(["printf", lines])] == ["1"]
    with raises(NotFound):
        read_gpus(["no-such-program"])
    with raises(Unavailable):
        read_gpus(["false"])
