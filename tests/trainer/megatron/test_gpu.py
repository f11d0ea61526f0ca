"""Tests the parts of Megatron that need a GPU: the hybrid optimizer, and TransformerEngine's in-place gradients."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from services.trainer.checkpoint.manifest import begin
from services.trainer.megatron import model
from services.trainer.ranks.worker import Worker
from tests.support import make_model
from tests.trainer.fsdp_harness import SMALL, Harness, samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

AWARE = {"use_precision_aware_optimizer": True}
HYBRID = AWARE | {"optimizer_cpu_offload": True}
OPTIMIZERS = {
    "aware": AWARE,
    "half": HYBRID | {"optimizer_offload_fraction": 0.5},
    "whole": HYBRID | {"optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": True},
}


class GpuHarness(Harness):
    def __init__(self, models: Path):
        super().__init__(dist.HashStore(), 0, 1, models)
        self.worker = Worker(dist.HashStore(), 0, 1, torch.device("cuda", 0))

    def open_with(self, optimizer: str, checkpoint: str = "") -> None:
        megatron = {"strategy": "megatron", "megatron": {"optimizer_config_kwargs": OPTIMIZERS[optimizer]}}
        self.open("untied", SMALL | {"compute_dtype": "bfloat16"} | megatron, checkpoint)

    def gradient_norm(self, kind: str) -> float:
        self.open(kind, SMALL | {"compute_dtype": "bfloat16", "strategy": "megatron"})
        return self.train(samples(0), version=0)["grad_norm"]

    def gradients(self, fp8: str, seed: int = 0) -> torch.Tensor:
        """Returns the gradient of one update of a model with the sizes of a real one, before the clip, float32."""
        settings = SMALL | {"compute_dtype": "bfloat16", "strategy": "megatron", "megatron": {"fp8": fp8}}
        self.open("qwen3-0.6b", settings)
        backend, step, kept = self.backend, self.backend.step, []

        def recording(*rates: float) -> float:
            parameters = [one for chunk in backend._model.ddp_chunks() for one in chunk.parameters()]
            kept.append(torch.cat([one.main_grad.float().flatten() for one in parameters]))
            return step(*rates)

        backend.step = recording
        self.train(samples(seed), version=0)
        return kept[0]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu().clone() for name, tensor in self.backend.weights()}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuHarness]:
    models = tmp_path_factory.mktemp("models")
    for kind in ("untied", "moe", "qwen3-0.6b"):
        make_model(models / kind, kind)
    harness = GpuHarness(models)
    yield harness
    harness.worker.close()


@pytest.fixture(scope="module")
def saved(
    harness: GpuHarness, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Saves a checkpoint after three updates with each optimizer; returns its path and the weights after the fourth."""
    kept = {}
    for name in OPTIMIZERS:
        harness.open_with(name)
        for version in range(3):
            harness.train(samples(version), version=version)
        path = tmp_path_factory.mktemp(name) / "checkpoint"
        begin(path)
        harness.worker.save(path=str(path), state={"version": 3, "last_batch_id": "b", "last_metrics": {}})
        harness.train(samples(5), version=3)
        kept[name] = path, harness.weights()
    return kept


@pytest.mark.parametrize("before", OPTIMIZERS)
@pytest.mark.parametrize("after", OPTIMIZERS)
def test_a_checkpoint_goes_on(harness: GpuHarness, saved, before: str, after: str) -> None:
    path, went_on = saved[before]
    harness.open_with(after, checkpoint=str(path))
    harness.train(samples(5), version=3)
    # Another Adam rounds differently, so that a weight may become the neighboring number in bfloat16.
    tolerance = {"rtol": 0, "atol": 0} if before == after else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(harness.weights(), went_on, **tolerance)


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_gradients_added_in_place_are_those_added_afterwards(
    harness: GpuHarness, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place = harness.gradient_norm(kind)
    monkeypatch.setattr(model, "add_gradients_in_place", lambda chunks: None)
    # If it is added afterwards, each micro-batch's part is rounded to bfloat16 first, up or down, by at most 2**-9.
    assert in_place == pytest.approx(harness.gradient_norm(kind), rel=2**-9)


@pytest.mark.parametrize("fp8", ["tensorwise", "blockwise"])
def test_a_float8_gradient_has_the_direction_of_that_of_bfloat16(harness: GpuHarness, fp8: str) -> None:
    plain, got, other = harness.gradients("none"), harness.gradients(fp8), harness.gradients("none", seed=1)
    near, far = (float(torch.cosine_similarity(plain, one, dim=0)) for one in (got, other))
    assert not torch.equal(got, plain)  # otherwise nothing was computed in float8
    assert near > 0.97 and abs(float(got.norm() / plain.norm()) - 1) < 0.05
    assert far < 0.9  # that of other samples
