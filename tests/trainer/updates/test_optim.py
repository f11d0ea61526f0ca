"""Tests that the learning rate and weight decay of each update equal Megatron's, and reach the optimizer."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from services.common.config.optim import OptimConfig
from services.common.config.trainer import CriticSettings, TrainerConfig
from services.trainer.updates.optim import learning_rate, weight_decay
from tests.trainer.fsdp_harness import OPTIM, Harness, samples
from tests.trainer.harness_processes import run_harness

# num_steps -> learning rate, weight decay; by the name of a config.
Tables = dict[str, list[tuple[float, float]]]

WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
SCHEDULES = {
    "constant": {"schedule": "constant"},
    **{name: {"schedule": name, "decay_steps": 300} for name in ("linear", "cosine", "inverse_square_root")},
    **{
        f"wsd-{style}": {"schedule": "wsd", "decay_steps": 300, "wsd_decay_steps": 120, "wsd_decay_style": style}
        for style in WSD_STYLES
    },
}
WARMUPS = {
    "no-warmup": {},
    "warmup": {"warmup_steps": 37},
    "warmup-from": {"warmup_steps": 37, "warmup_init_ratio": 0.2, "min_lr_ratio": 0.1},
    "warmup-of-one": {"warmup_steps": 1, "min_lr_ratio": 1.0},
}


RATES = {
    f"{schedule} {warmup}": OptimConfig(lr=3e-4, weight_decay=0.1, **SCHEDULES[schedule], **WARMUPS[warmup])
    for schedule in SCHEDULES
    for warmup in WARMUPS
}
DECAYS = {
    f"{style} {start} {end}": OptimConfig(
        weight_decay=start, weight_decay_end=end, weight_decay_schedule=style, weight_decay_steps=300
    )
    for style in ("linear", "cosine")
    for start, end in ((0.0, 0.1), (0.01, 0.1), (0.1, 0.01), (0.1, 0.0))
}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    configs = {name: config.model_dump(mode="json") for name, config in (RATES | DECAYS).items()}
    file = tmp_path_factory.mktemp("schedule") / "tables.json"
    run_harness("megatron_schedule", file.parent, file, configs)
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", RATES)
def test_learning_rate_is_megatrons(megatron: Tables, name: str) -> None:
    config, want = RATES[name], megatron[name]
    assert len(want) == 450
    for update in range(len(want)):
        # Their step 0 comes before the first update; in the warm-up ours is one ahead, after it the same.
        num_steps = update + 1 if update < config.warmup_steps else update
        # The same operations up to their order: a rounding of 1e-16, of which cosine's last steps make 4e-12 if the
        # share of the decay is not the same number.
        assert learning_rate(config, update) == pytest.approx(want[num_steps][0], rel=1e-12, abs=0), update


def test_no_two_schedules_are_the_same() -> None:
    # Otherwise a style could be compared with another's.
    configs = [OptimConfig(lr=1.0, **SCHEDULES[name], **WARMUPS["warmup"]) for name in SCHEDULES]
    assert len({learning_rate(config, 250) for config in configs}) == len(SCHEDULES)


@pytest.mark.parametrize("name", RATES)
def test_first_update_is_not_wasted_and_the_peak_is_reached(name: str) -> None:
    config = RATES[name]
    assert learning_rate(config, 0) > 0
    assert learning_rate(config, config.warmup_steps) == pytest.approx(3e-4, rel=1e-12)


@pytest.mark.parametrize("name", [*DECAYS, "constant warmup"])
def test_weight_decay_is_megatrons(megatron: Tables, name: str) -> None:
    config = (RATES | DECAYS)[name]
    for num_steps, (_, want) in enumerate(megatron[name]):
        # Absolute where it falls to 0: there it is a difference of numbers of size 0.1.
        assert weight_decay(config, num_steps) == pytest.approx(want, rel=1e-12, abs=1e-17), num_steps
    end = config.weight_decay if config.weight_decay_end is None else config.weight_decay_end
    assert weight_decay(config, 0) == pytest.approx(config.weight_decay, abs=1e-17)
    assert weight_decay(config, 10**9) == end


WRONG = {
    "decay_steps": {"schedule": "inverse_square_root"},
    "need each other": {"schedule": "wsd", "decay_steps": 10},
    "both or neither": {"schedule": "cosine", "decay_steps": 10, "wsd_decay_steps": 5},
    "at most decay_steps 10 - warmup_steps 4": {
        "schedule": "wsd",
        "decay_steps": 10,
        "warmup_steps": 4,
        "wsd_decay_steps": 7,
    },
    "weight_decay_end and weight_decay_steps": {"weight_decay_schedule": "cosine", "weight_decay_end": 0.1},
    "constant allows neither": {"weight_decay_steps": 10},
}


@pytest.mark.parametrize("words", WRONG)
def test_half_a_schedule_is_refused(words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        OptimConfig(**WRONG[words])


@pytest.mark.parametrize("kind", [TrainerConfig, CriticSettings])
def test_muon_is_refused_with_megatron(kind: type[TrainerConfig]) -> None:
    with pytest.raises(ValidationError, match=r"optim\.kind muon needs strategy fsdp"):
        kind.model_validate({"strategy": "megatron", "optim": {"kind": "muon"}})
    kind.model_validate({"optim": {"kind": "muon"}})


def test_decay_may_follow_the_warmup_at_once() -> None:
    OptimConfig(schedule="wsd", decay_steps=10, warmup_steps=4, wsd_decay_steps=6)


def test_each_update_has_its_learning_rate_and_weight_decay(harness: Harness) -> None:
    settings = OPTIM | {
        "schedule": "wsd",
        "decay_steps": 6,
        "wsd_decay_steps": 4,
        "weight_decay_schedule": "linear",
        "weight_decay_end": 0.5,
        "weight_decay_steps": 4,
    }
    harness.open("untied", {"optim": settings, "num_minibatches": 2})
    optimizer, seen, step = harness.backend._optimizers[0], [], harness.backend._optimizers[0].step

    def recording() -> None:
        matrices, vectors = sorted(optimizer.param_groups, key=lambda group: -group["weight_decay"])
        assert all(p.ndim >= 2 for p in matrices["params"]) and all(p.ndim == 1 for p in vectors["params"])
        assert matrices["lr"] == vectors["lr"]
        seen.append((matrices["lr"], matrices["weight_decay"], vectors["weight_decay"]))
        step()

    optimizer.step = recording
    metrics = [harness.train(samples(), version) for version in (1, 2)]
    config = OptimConfig(**settings)
    want = [(learning_rate(config, update), weight_decay(config, update), 0.0) for update in (2, 3, 4, 5)]
    assert seen == want
    assert len(set(want)) == 4  # weight decay stands still from update 4 on, the learning rate does not
    assert [m["lr"] for m in metrics] == [(want[0][0] + want[1][0]) / 2, (want[2][0] + want[3][0]) / 2]


def test_updates_are_counted_over_epochs(harness: Harness) -> None:
    settings = OPTIM | {"warmup_steps": 20}
    harness.open("untied", {"optim": settings, "num_minibatches": 2, "num_epochs": 3})
    optim = OptimConfig(**settings)
    for version in (0, 1):
        rates = [learning_rate(optim, 6 * version + update) for update in range(6)]
        assert harness.train(samples(), version)["lr"] == pytest.approx(sum(rates) / 6)


def test_checkpoint_keeps_the_groups_that_do_not_decay(harness: Harness, tmp_path: Path) -> None:
    harness.open("untied", {})
    harness.train(samples())
    harness.backend.save(tmp_path / "state")
    harness.open("untied", {})
    harness.backend.load(tmp_path / "state")
    for group in harness.backend._optimizers[0].param_groups:
        assert group["wd_mult"] == float(group["params"][0].ndim >= 2)
    assert torch.tensor([harness.train(samples(), 1)["loss"]]).isfinite()


def test_muon_updates_the_matrices_of_layers_and_adamw_all_else(harness: Harness) -> None:
    settings = OPTIM | {"kind": "muon", "max_grad_norm": 1e9}
    harness.open("untied", {"optim": settings})
    want = {name: torch.nn.Parameter(tensor) for name, tensor in harness.parameters().items()}
    gradients, _ = harness.gradients_of(samples())
    hidden = [name for name, tensor in want.items() if ".layers." in name and tensor.ndim == 2]
    assert len(hidden) == 7 * 2 and {"lm_head.weight", "model.embed_tokens.weight"} <= want.keys() - hidden
    config = OptimConfig(**settings)
    for name, parameter in want.items():
        parameter.grad = gradients[name]
        rates = {"lr": config.lr, "weight_decay": config.weight_decay if parameter.ndim == 2 else 0.0}
        if name in hidden:
            torch.optim.Muon([parameter], adjust_lr_fn="match_rms_adamw", **rates).step()
        else:
            torch.optim.AdamW([parameter], betas=config.betas, eps=config.eps, fused=True, **rates).step()
    # The same operations on one rank.
    assert all(torch.equal(tensor, want[name]) for name, tensor in harness.parameters().items())
