"""Makes the tests independent of how busy the machine is and of how they are started, and shares services.

Services are shared because starting a replica or a trainer takes longer than most runs on them.
"""

import gc
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.e2e.lockstep_command import Lent

# These are set before any test imports torch: it uses one thread here, and the threads of services sleep while they
# wait for work. If they spin, operations on tiny tensors take 16 times the CPU time while other processes need the
# cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts background jobs with SIGINT ignored, and their children inherit that; tests send SIGINT to commands.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time that an example takes depends on how busy the machine is.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


gc.disable()  # while modules are imported, which makes no garbage


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Excludes what was imported, and what earlier modules keep, from later garbage collections.

    Going through it takes up to half a second, and a rank collects garbage whenever it closes a role.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def lent_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Lent"]:
    """Yields a running trainer of two ranks and two running replicas: trainer, rollout-0 and rollout-1."""
    from tests.e2e.lockstep_command import Lent, running_services
    from tests.support import free_port

    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("trainer", "rollout-0", "rollout-1")}
    directory = tmp_path_factory.mktemp("lent")
    with running_services(addresses, directory) as processes:
        lent = Lent(addresses, dict(zip(addresses, processes, strict=True)), directory)
        yield lent
        assert all(process.poll() is None for process in processes), "a service that was only borrowed has ended"
        logged = {name: len(lent.log(name)) for name in addresses}
    ends = {name: lent.log(name)[logged[name] :] for name in addresses}
    assert not [said for said in ends.values() if "Traceback" in said], "not a quiet end"


@pytest.fixture(scope="session")
def lent(lent_services: "Lent") -> Sequence[str]:
    """Returns the options of `lockstep run` that name the lent services, in their order.

    The services run in a directory of their own, so the path of a model must be absolute.
    """
    return lent_services.options


@pytest.fixture(scope="session")
def undisturbed(lent_services: "Lent", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the workspace of a run that nothing disturbed, which others are compared with."""
    from tests.e2e.lockstep_command import reference

    workspace = tmp_path_factory.mktemp("reference")
    reference(workspace, lent_services)
    return workspace


@pytest.fixture(scope="session")
def long_undisturbed(lent_services: "Lent", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the workspace of such a run of six steps."""
    from tests.e2e.lockstep_command import reference

    workspace = tmp_path_factory.mktemp("long-reference")
    reference(workspace, lent_services, num_steps=6)
    return workspace


@pytest.fixture
def inspects_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets vLLM look at a model's class in this process. The new interpreter that it starts otherwise, if this host has
    not run the model before, takes five seconds."""
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Makes this process the only rank of a process group, if no other test has made it one."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
