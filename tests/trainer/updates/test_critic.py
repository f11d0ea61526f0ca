"""Tests that the critic's values are those of transformers and its updates those of plain torch.

They are the same in every layout of both backends.
"""

import json
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.common.config.trainer import CriticConfig, CriticSettings, TrainerConfig
from services.trainer.backend import Role
from tests.support import make_model
from tests.trainer.critic_harness import (
    CHECKPOINTS,
    FSDP,
    HEAD,
    LAYOUTS,
    LONG,
    LONG_PAIRS,
    LONG_SHARED,
    MISTAKEN,
    SHARED,
    critic_config,
    critic_samples,
    critic_weights,
    open_critic,
)
from tests.trainer.fsdp_harness import SMALL, read
from tests.trainer.harness_processes import marked, pairs_of, run_harness, to_run
from tests.trainer.megatron_harness import MegatronHarness
from tests.trainer.megatron_layouts import Layout

# A value is a float32 sum of 64 products of size up to 1e-1 over a hidden state of size 1 to 4, and off by up to 8e-7
# here.
VALUE_TOLERANCE = 5e-6
# Metrics are means of 70 terms of size 1, and the norm of 1e5 numbers; they are off by up to 3e-7 here.
METRIC_TOLERANCE = 5e-6
# Relative to a tensor's largest entry, weights are off by up to 1e-6 here, where an update is 2e-4 and more. The head
# begins at 0 and has entries of 2e-2 after two updates. Where Adam's eps is larger than the rest of its divisor, an
# update is off by lr / eps = 10 times the rounding of its gradient, and the head by 6e-6.
WEIGHT_TOLERANCE, HEAD_TOLERANCE = 3e-6, 2e-5
# Against float64, the rounding of the float32 forward itself counts too; see tests/trainer/fsdp/test_backend.py.
REFERENCE_TOLERANCE = 2e-5
COMPARED = [name for name, layout in LAYOUTS.items() if layout.like]
CLIPS = [(None, "token_mean"), (0.2, "token_mean"), (0.2, "seq_mean_token_mean")]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, trainer_files: Path) -> Path:
    """Runs critic_harness; returns the directory of its results."""
    make_model(trainer_files / "models" / "deep", "deep")
    out = trainer_files / "critic"
    work = ((LAYOUTS, LONG), (CHECKPOINTS, LONG_PAIRS), (SHARED, LONG_SHARED))
    run_harness("critic_harness", out, out, *(to_run(request, __file__, names, long) for names, long in work))
    return out


@pytest.fixture(scope="module")
def rank(trainer_files: Path) -> Iterator[MegatronHarness]:
    """Provides a world of one rank, in this process."""
    harness = MegatronHarness(dist.HashStore(), 0, 1, trainer_files / "models")
    yield harness
    harness.worker.close()


@pytest.fixture(scope="module")
def head_D() -> torch.Tensor:
    """Provides a head that is not 0 and makes values of size 1."""
    return torch.randn(64, generator=torch.Generator().manual_seed(3)) / 8


def open_with_head(rank: MegatronHarness, settings: CriticSettings, head_D: torch.Tensor, kind: str = "untied") -> Any:
    """Opens a critic on FSDP with this head; returns its backend."""
    rank.worker.close()
    rank._settings, rank._data_ranks = {}, {}
    rank.open_role(Role.CRITIC, kind, settings)
    backend = rank.worker._backends[Role.CRITIC]
    with torch.no_grad():
        backend._model.value_head.weight.to_local().copy_(head_D[None])
    return backend


def plain_values(model: torch.nn.Module, head_D: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    """Returns the values before each completion token, from the hidden states of transformers."""
    prompt, completion = row["prompt_tokens"], row["tokens"]
    hidden_TD = model.model(input_ids=torch.tensor([prompt + completion])).last_hidden_state[0]
    return hidden_TD[len(prompt) - 1 : -1] @ head_D


def plain_loss(scored: Sequence[tuple[torch.Tensor, dict[str, Any]]], settings: CriticSettings) -> torch.Tensor:
    """Returns PPO's value loss of whole samples, without those that have no trained token."""
    losses = []
    for values, row in scored:
        kept = torch.tensor(row["loss_mask"])
        old, returns = (torch.tensor(row[name], dtype=torch.float64)[kept] for name in ("values", "returns"))
        values, clip = values[kept], settings.value_loss.value_clip
        squares = (values - returns) ** 2
        if clip is not None:
            squares = torch.maximum(squares, (old + (values - old).clamp(-clip, clip) - returns) ** 2)
        if len(squares):
            losses.append(squares / 2)
    if settings.value_loss.aggregation == "token_mean":
        return torch.cat(losses).mean()
    return torch.stack([tokens.mean() for tokens in losses]).mean()


def assert_weights_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        gap = (got[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp_min(1e-12)
        assert gap <= tolerance, f"{name}: {gap:.3g}"


def assert_trained_alike(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert_weights_close({HEAD: got.pop(HEAD)}, {HEAD: want.pop(HEAD)}, HEAD_TOLERANCE)
    assert_weights_close(got, want, WEIGHT_TOLERANCE)


def assert_metrics_close(got: dict[str, float], want: dict[str, float], tolerance: float) -> None:
    assert got.keys() == want.keys()
    assert got == pytest.approx(want, rel=tolerance, abs=tolerance)


def flat(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.concatenate([np.asarray(row) for row in rows])


@pytest.mark.parametrize("kind", ["untied", "tied", "moe"])
def test_values_are_those_of_transformers_under_the_head(
    rank: MegatronHarness, trainer_files: Path, head_D: torch.Tensor, kind: str
) -> None:
    open_critic(rank, Layout(kind, 1, {}, FSDP))
    assert not flat(rank.forward(critic_samples(), Role.CRITIC, "values")).any()
    open_with_head(rank, critic_config(Layout(kind, 1, {}, FSDP)), head_D, kind)
    got = rank.forward(critic_samples(), Role.CRITIC, "values")
    model = AutoModelForCausalLM.from_pretrained(trainer_files / "models" / kind, dtype=torch.float32)
    with torch.no_grad():
        want = [plain_values(model, head_D, row).numpy() for row in critic_samples().to_pylist()]
    assert np.abs(flat(want)).max() > 1
    np.testing.assert_allclose(flat(got), flat(want), rtol=0, atol=VALUE_TOLERANCE)


@pytest.mark.parametrize(("clip", "aggregation"), CLIPS)
def test_update_is_that_of_plain_torch(
    rank: MegatronHarness, trainer_files: Path, head_D: torch.Tensor, clip: float | None, aggregation: str
) -> None:
    settings = critic_config(Layout("untied", 1, {}, FSDP), {"value_clip": clip, "aggregation": aggregation})
    backend, rows = open_with_head(rank, settings, head_D), critic_samples().to_pylist()
    gradients: dict[str, torch.Tensor] = {}
    step = backend.step

    def recording(*rates: float) -> float:
        named = backend._model.named_parameters()
        gradients.update({name.removeprefix("causal_lm."): p.grad.full_tensor().clone() for name, p in named})
        return step(*rates)

    backend.step = recording
    metrics = rank.train(critic_samples(), role=Role.CRITIC)

    model = AutoModelForCausalLM.from_pretrained(
        trainer_files / "models" / "untied", dtype=torch.float64, attn_implementation="eager"
    )
    head = torch.nn.Parameter(head_D.double())
    named = {f"model.{name}": p for name, p in model.model.named_parameters()} | {HEAD: head}
    optim = settings.optim
    groups = [{"params": [p], "weight_decay": 0.0 if "norm" in n else optim.weight_decay} for n, p in named.items()]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    scored = [(plain_values(model, head, row), row) for row in rows]
    loss = plain_loss(scored, settings)
    loss.backward()
    want = {name: p.grad.clone() for name, p in named.items()}
    norm = torch.nn.utils.clip_grad_norm_(named.values(), optim.max_grad_norm)
    assert norm > 2 * optim.max_grad_norm
    optimizer.step()

    assert_weights_close(gradients, want | {HEAD: want[HEAD][None]}, REFERENCE_TOLERANCE)
    after = {name: p.detach() for name, p in named.items()} | {HEAD: head.detach()[None]}
    assert_weights_close(critic_weights(rank), after, REFERENCE_TOLERANCE)
    kept = [torch.tensor(row["loss_mask"]) for row in rows]
    values = torch.cat([held.detach()[mask] for (held, _), mask in zip(scored, kept, strict=True)])
    returns = torch.cat([torch.tensor(row["returns"])[mask].double() for row, mask in zip(rows, kept, strict=True)])
    explained = 1 - (returns - values).var() / returns.var()
    wanted = {"loss": loss, "grad_norm": norm, "explained_variance": explained, "value_mean": values.mean()}
    for name, value in wanted.items():
        assert metrics[f"critic_{name}"] == pytest.approx(float(value), rel=REFERENCE_TOLERANCE), name
    assert metrics["critic_lr"] == optim.lr


def test_epochs_pass_over_the_batch_again(rank: MegatronHarness, head_D: torch.Tensor) -> None:
    open_with_head(rank, critic_config(Layout("untied", 1, {}, FSDP | {"num_epochs": 2})), head_D)
    metrics, weights = rank.train(critic_samples(), role=Role.CRITIC), critic_weights(rank)
    open_with_head(rank, critic_config(Layout("untied", 1, {}, FSDP)), head_D)
    twice = [rank.train(critic_samples(), version=version, role=Role.CRITIC) for version in range(2)]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in critic_weights(rank).items())
    assert metrics["critic_loss"] == pytest.approx((twice[0]["critic_loss"] + twice[1]["critic_loss"]) / 2)
    assert twice[1]["critic_loss"] != twice[0]["critic_loss"]


def test_epochs_are_the_policys_unless_given() -> None:
    trainer = TrainerConfig(num_epochs=3)
    assert CriticConfig().settings(trainer).num_epochs == 3
    assert CriticConfig(num_epochs=2).settings(trainer).num_epochs == 2


def test_masked_tokens_do_not_count(rank: MegatronHarness, head_D: torch.Tensor) -> None:
    results = []
    for returns in (0.0, 1e6):
        table = critic_samples()
        rows = zip(table["returns"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)
        changed = [[x if keep else returns for x, keep in zip(*row, strict=True)] for row in rows]
        index = table.schema.get_field_index("returns")
        table = table.set_column(index, table.schema.field(index), pa.array(changed, pa.list_(pa.float32())))
        open_with_head(rank, critic_config(Layout("untied", 1, {}, FSDP)), head_D)
        results.append((rank.train(table, role=Role.CRITIC), critic_weights(rank)))
    (metrics, weights), (other_metrics, other_weights) = results
    assert metrics == other_metrics
    assert all(torch.equal(weights[name], tensor) for name, tensor in other_weights.items())


@pytest.mark.parametrize("changes", [FSDP, SMALL], ids=["fsdp", "megatron"])
def test_a_critic_that_is_opened_anew_or_closed_is_freed(rank: MegatronHarness, changes: dict[str, Any]) -> None:
    layout = Layout("untied", 1, {}, changes)
    open_critic(rank, layout)
    for end in (lambda: rank.open_role(Role.CRITIC, "untied", critic_config(layout)), rank.worker.close):
        rank.train(critic_samples(), role=Role.CRITIC)
        model = rank.worker._backends[Role.CRITIC]._model
        parameters = [weakref.ref(p) for module in getattr(model, "chunks", [model]) for p in module.parameters()]
        del model
        assert len(parameters) > 10
        end()
        assert [parameter() for parameter in parameters if parameter() is not None] == []


@pytest.mark.parametrize("name", marked(COMPARED, LONG))
def test_layout_does_not_change_the_result(results: Path, name: str) -> None:
    weights, answers = read(results, name)
    want_weights, want = read(results, LAYOUTS[name].like)
    for got_values, want_values in zip(answers["values"], want["values"], strict=True):
        np.testing.assert_allclose(flat(got_values), flat(want_values), rtol=0, atol=VALUE_TOLERANCE)
    assert not flat(answers["values"][0]).any()
    for ours, theirs in zip(answers["updates"], want["updates"], strict=True):
        assert_metrics_close(ours, theirs, METRIC_TOLERANCE)
    assert_trained_alike(weights, want_weights)


def test_the_comparison_is_of_updates_that_change_much(results: Path, trainer_files: Path) -> None:
    for kind in ("untied", "tied", "moe", "deep"):
        weights, answers = read(results, f"{kind}-fsdp")
        stored = load_file(trainer_files / "models" / kind / "model.safetensors")
        assert weights.keys() == stored.keys() - {"lm_head.weight"} | {HEAD}
        moved = {name: float((weights[name] - stored.get(name, 0)).abs().max()) for name in weights}
        assert min(moved.values()) > 2e-4, min(moved, key=moved.__getitem__)
        assert np.abs(flat(answers["values"][-1])).max() > 0.3
        assert all(0.3 < update["critic_loss"] < 3 for update in answers["updates"])


@pytest.mark.parametrize("name", marked(["bf16-fsdp", "bf16-tp2"], LONG))
def test_bfloat16_follows_float32(results: Path, name: str) -> None:
    _, want = read(results, "untied-fsdp")
    _, got = read(results, name)
    for ours, theirs in zip(got["values"], want["values"], strict=True):
        # Each rounding of activations of size 4 is 2^-9 relative, over 2 layers, under a head of 64 times 1e-2.
        np.testing.assert_allclose(flat(ours), flat(theirs), rtol=0, atol=0.05)
    # Values are not rounded to bfloat16 at the end, where numbers between 0.25 and 0.5 lie 2^-9 apart.
    last = torch.tensor(flat(got["values"][-1]), dtype=torch.float32)
    assert (last != last.bfloat16()).float().mean() > 0.9


def test_a_closed_critic_leaves_neither_threads_nor_files(results: Path) -> None:
    # The process groups of a run bring some 60 threads and 90 files; groups kept after its end would add as many.
    names = [name for name, layout in LAYOUTS.items() if layout.world == 2 and "fsdp" not in name]
    names = [name for name in names if (results / f"{name}.json").exists()]
    for key in ("num_threads", "num_files"):
        counts = {name: read(results, name)[1][key] for name in names}
        assert max(counts.values()) - min(counts.values()) < 25, counts


@pytest.mark.parametrize("name", marked(SHARED, LONG_SHARED))
def test_roles_on_the_same_ranks_do_not_disturb_each_other(results: Path, name: str) -> None:
    """Checks that the policy's outputs and weights do not depend on the critic's presence, nor the reverse.

    Not one bit differs.
    """
    answers = json.loads((results / f"shared-{name}.json").read_text())
    together = answers["together"]
    for part in ("policy", "critic"):
        alone = answers[part]
        assert len(alone) > 2
        assert [letter for letter, outputs in alone.items() if outputs != together[letter]] == []
    assert together["P"][0] != together["P"][1]
    assert together["weights"] != together["critic weights"]


@pytest.mark.parametrize(("saved", "loaded"), pairs_of(CHECKPOINTS, LONG_PAIRS))
def test_checkpoint_goes_on_with_the_same_numbers(results: Path, saved: str, loaded: str) -> None:
    want, want_metrics = read(results, f"{saved} went on")
    weights, metrics = read(results, f"{saved} to {loaded}")
    if saved == loaded:
        assert metrics == want_metrics
        assert [name for name, tensor in want.items() if not torch.equal(weights[name], tensor)] == []
    assert_metrics_close(metrics, want_metrics, METRIC_TOLERANCE)
    assert_trained_alike(weights, want)


@pytest.mark.parametrize("name", MISTAKEN)
def test_checkpoint_of_another_role_is_refused(results: Path, name: str) -> None:
    answers = json.loads((results / f"{name}-mistaken.json").read_text())
    assert answers["unchanged"]
    for role in ("policy", "critic"):
        kind, message = answers[role]
        assert kind == "PreconditionFailed"
        assert role in message and "role" in message


def test_critic_starts_from_converted_weights_of_a_language_model(results: Path, trainer_files: Path) -> None:
    weights, answers = read(results, "converted")
    assert not flat(answers["values"]).any()
    assert not weights.pop(HEAD).any()
    stored = load_file(trainer_files / "models" / "untied" / "model.safetensors")
    assert weights.keys() == stored.keys() - {"lm_head.weight"}
    assert [name for name, tensor in weights.items() if not torch.equal(stored[name], tensor)] == []
