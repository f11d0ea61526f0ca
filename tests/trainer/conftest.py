"""Provides one trainer deployment and one run of the FSDP scenarios, which all tests share."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from tests.support import make_model
from tests.trainer import fsdp_harness
from tests.trainer.deployment import Deployment, deployed
from tests.trainer.fsdp_harness import KINDS, Harness
from tests.trainer.harness_processes import start_harness

disable_progress_bar()


@pytest.fixture(scope="session")
def trainer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides a directory that has the tiny models in `models/<kind>`."""
    directory = tmp_path_factory.mktemp("trainer")
    for kind in KINDS:
        make_model(directory / "models" / kind, kind)
    return directory


@pytest.fixture(scope="session")
def harness(trainer_files: Path) -> Iterator[Harness]:
    """Provides a world of one rank, in this process."""
    harness = Harness(dist.HashStore(), 0, 1, trainer_files / "models")
    yield harness
    harness.worker.close()


@pytest.fixture(scope="session")
def worlds(trainer_files: Path, harness: Harness) -> dict[int, Path]:
    """Runs every scenario of fsdp_harness; returns the directory of the results by world size."""
    results = {world: trainer_files / f"world{world}" for world in (1, 2)}
    for directory in results.values():
        directory.mkdir()
    ranks = [start_harness("fsdp_harness", rank, 2, results[2]) for rank in range(2)]
    try:
        fsdp_harness.run_all(harness, results[1])
        for rank in ranks:
            rank.join(1200)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return results


@pytest.fixture(scope="session")
async def deployment(trainer_files: Path) -> AsyncIterator[Deployment]:
    """Provides a trainer service of two ranks, started as an operator starts it."""
    async with deployed("services.trainer", trainer_files) as deployment:
        yield deployment


@pytest.fixture
async def trainer(deployment: Deployment) -> Deployment:
    """Provides the deployment with a run open of which nothing was trained, and its weights published."""
    await deployment.open_published()
    return deployment
