"""Tests `lockstep sft`: a tiny model learns sums by heart, and a killed run ends as one that nothing disturbed.

The run leaves a model from which reinforcement learning can start. Megatron trains as FSDP does.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from services.common.model_card import read_model_card
from services.coordinator.text.tokenizer import Tokenizer
from tests.e2e.lockstep_command import LockstepRun, numbers, weights
from tests.support import make_model

SUMS = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(6) for b in range(6)]
HELD_OUT = SUMS[:35:5]  # 7 rows, which two ranks do not divide
NUM_EPOCHS, NUM_STEPS = 11, 33
FIRST_STEPS = 11


class SftRun(LockstepRun):
    """Runs `lockstep sft sft.yaml ...` in a workspace."""

    command = ("sft", "sft.yaml")


def make_workspace(base: Path, name: str) -> Path:
    workspace = base / name
    workspace.mkdir()
    config = {
        "name": "run",
        "model": str(base / "model"),
        "num_epochs": NUM_EPOCHS,
        "data": {
            "train": str(base / "train.parquet"),
            "eval": {"sums": str(base / "held-out.parquet")},
            "samples_per_step": 12,
            "max_tokens": 8,
        },
        # 12 rows of 6 or 7 tokens do not fit 2 x 16: micro-batches are accumulated.
        "trainer": {"num_ranks": 2, "max_tokens_per_microbatch": 16, "optim": {"lr": 2e-3}},
        "evaluation": {"eval_freq": 11},
        "checkpoint": {"save_freq": 11},
    }
    (workspace / "sft.yaml").write_text(yaml.safe_dump(config))
    return workspace


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sft")
    make_model(directory / "model", "untied")
    pq.write_table(pa.Table.from_pylist(SUMS), directory / "train.parquet")
    pq.write_table(pa.Table.from_pylist(HELD_OUT), directory / "held-out.parquet")
    return directory


@pytest.fixture(scope="module")
def killed(base: Path) -> Path:
    """Provides the workspace of a run whose coordinator `undisturbed` kills after the first checkpoint."""
    return make_workspace(base, "killed")


@pytest.fixture(scope="module")
def trainer(lent: Sequence[str]) -> str:
    """Provides the option that names a trainer of two ranks, which has one run after the other."""
    return lent[0]


@pytest.fixture(scope="module")
def undisturbed(base: Path, killed: Path, trainer: str) -> Path:
    """Provides the workspace of a run that nothing disturbs, on a trainer on which the killed run is still open."""
    workspace = make_workspace(base, "undisturbed")
    with SftRun(killed, trainer) as run:
        run.until(lambda: run.has("finished", 13), "step 13")
        run.process.kill()
        run.process.wait()
        assert not run.has("finished", NUM_STEPS)
    with SftRun(workspace, trainer) as run:
        assert run.wait() == 0, run.output
        assert "held-out after step 33" in run.output
    return workspace


def test_it_learns(undisturbed: Path) -> None:
    assert "training from " in (undisturbed / "runs" / "run" / "logs" / "coordinator.log").read_text()
    lines = numbers(undisturbed)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == NUM_STEPS
    # The vocabulary has 64 tokens, and the model is at first far from sure of any. In the end it knows the end token
    # and most digits.
    assert losses[0] > math.log(64) * 0.9 and max(losses[-3:]) < 0.3
    held_out = {line["step"]: line["eval/sums/nll"] for line in lines if "eval/sums/nll" in line}
    assert list(held_out) == [0, 11, 22, 33] and held_out[33] < 0.2
    step = next(line for line in lines if line["step"] == 1)
    assert step["batch/samples"] == 12
    assert 24 <= step["batch/trained_tokens"] <= 36  # one or two digits and the end token
    assert step["batch/tokens"] == step["batch/trained_tokens"] + 12 * 4


def test_the_held_out_loss_is_that_of_transformers(base: Path, undisturbed: Path) -> None:
    for version, model in ((0, base / "model"), (NUM_STEPS, undisturbed / "runs" / "run" / "model")):
        logged = next(line for line in numbers(undisturbed) if line["step"] == version and "eval/sums/nll" in line)
        losses = torch.cat(list(response_nlls(model, HELD_OUT)))
        # Both are computed from sums of tens of float32 log-probabilities of a few nats.
        assert logged["eval/sums/nll"] == pytest.approx(losses.mean().item(), abs=1e-5)
        assert logged["eval/sums/perplexity"] == pytest.approx(math.exp(logged["eval/sums/nll"]))


def test_a_killed_run_goes_on_as_if_nothing_had_been(killed: Path, undisturbed: Path) -> None:
    """The run continues from its checkpoint, this time on a trainer of its own."""
    with SftRun(killed, "resume=must") as run:
        assert run.wait() == 0, run.output
        assert not run.below()
        checkpoint = run.ledger("opened")[-1]["checkpoint"]
        assert checkpoint.endswith(("step-000011", "step-000022"))
        assert f"resuming after step {int(checkpoint[-6:])}, from {checkpoint}" in run.output
    assert numbers(killed) == numbers(undisturbed)
    assert weights(killed) == weights(undisturbed) != {}


@pytest.mark.parametrize("tensor_parallel", [pytest.param(1, marks=pytest.mark.long), 2])
def test_megatron_trains_as_fsdp_does(base: Path, undisturbed: Path, trainer: str, tensor_parallel: int) -> None:
    workspace = make_workspace(base, f"megatron-tp{tensor_parallel}")
    layout = ["trainer.strategy=megatron", f"trainer.megatron.tensor_model_parallel_size={tensor_parallel}"]
    with SftRun(workspace, trainer, *layout, "num_epochs=null", f"num_steps={FIRST_STEPS}") as run:
        assert run.wait() == 0, run.output
    got, want = numbers(workspace), [line for line in numbers(undisturbed) if line["step"] <= FIRST_STEPS]
    assert len(want) == FIRST_STEPS + 2  # the held-out losses before and after are lines of their own
    for ours, theirs in zip(got, want, strict=True):
        # These are means over tens of float32 numbers of about 1, added in another order. The relative difference is up
        # to 3e-7 here, after all steps as after one.
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_model_answers_and_is_one_to_start_from(undisturbed: Path) -> None:
    directory = undisturbed / "runs" / "run" / "model"
    tokenizer = Tokenizer.load(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    for row in SUMS:
        tokens = torch.tensor([tokenizer.encode(row["prompt"])])
        answer = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
        assert tokenizer.decode(answer[0, tokens.shape[1] :].tolist()) == row["response"]
    card = read_model_card(directory)  # what a run reads of its `model`
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(card.files)


def response_nlls(directory: Path, rows: list[dict[str, str]]) -> Iterator[torch.Tensor]:
    """Yields for each row the negative log-likelihoods [tokens] of the response and of its end token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), Tokenizer.load(directory)
    for row in rows:
        prompt = tokenizer.encode(row["prompt"])
        tokens = torch.tensor([*prompt, *tokenizer.encode(row["response"]), tokenizer.eos_token_ids[0]])
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        yield -logprobs.gather(1, tokens[1:, None])[len(prompt) - 1 :, 0]


def test_a_run_that_gets_no_better_ends_and_stays_ended(base: Path, trainer: str) -> None:
    """Tests early stopping and `keep_best` with mode `max` on a loss that only falls.

    No evaluation is better than the first, so the run ends once its patience is used up. Of the saved steps, step 2 has
    the largest loss, so its checkpoint is kept.
    """
    workspace = make_workspace(base, "early")
    largest = {"metric": "eval/sums/nll", "mode": "max"}
    changes = {
        "evaluation": {"eval_freq": 2, "early_stopping": {**largest, "patience": 2}},
        "checkpoint": {"save_freq": 2, "max_ckpts_to_keep": 1, "keep_best": largest},
    }
    (workspace / "early.yaml").write_text(yaml.safe_dump(changes))
    for _ in range(2):
        with SftRun(workspace, "early.yaml", trainer) as run:
            assert run.wait() == 0, run.output
        assert "early stopping after step 4" in run.output and "4 steps done" in run.output
        assert [line["step"] for line in numbers(workspace) if "train/loss" in line] == [1, 2, 3, 4]
        kept = sorted(path.name for path in (run.directory / "checkpoints").iterdir())
        assert kept == ["step-000002", "step-000004"]
    assert (run.directory / "model" / "config.json").is_file()
