"""Checks that this host meets the needs of a run, before anything is started."""

import os
import platform
import re
import shutil
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from importlib.metadata import distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from services.common.config.load import AnyConfig
from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.common.errors import DataLoss, InvalidInput, LockstepError
from services.common.process import compiled_code, require_cache, socket_directory
from services.common.rpc.address import PORTS, hold_free_port
from services.coordinator.clients.gpus import Gpu, read_gpus, split_gpus, visible_gpus
from services.coordinator.doctor import Finding, Verdict
from services.coordinator.fleet.launch import Addresses, started_ranks, starts_replicas
from services.coordinator.fleet.probes import SANDBOX, problem
from services.coordinator.planning.frozen import sized_model
from services.coordinator.planning.memory import colocated_phases, rank_memory, trained_parameters, utilization
from services.coordinator.planning.plan import planned_model
from services.coordinator.runs.database import has_local_locks, is_shared
from services.coordinator.runs.ledger import LEDGER, Kind, Ledger
from services.coordinator.runs.reader import LedgerReader

_GIB = 2**30
# The oldest driver for each major version of CUDA (NVIDIA's table of minor-version compatibility).
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


def examine_gpus(config: AnyConfig | None, addresses: Addresses, driver: str, cuda: str | None) -> Iterator[Finding]:
    """Runs the checks; yields nothing on a host without GPUs. `cuda` is the version that torch was built for."""
    if not visible_gpus():
        return
    yield check_driver(driver, cuda)
    yield check_compiler(Path(sysconfig.get_path("include")))
    if not isinstance(config, Config) or addresses.trainer or addresses.rollout:
        return
    if not (Path(config.model) / "config.json").is_file():
        return
    try:
        yield check_memory(config, read_gpus())
    except InvalidInput as error:  # see the check of the model
        yield Finding("GPU memory", f"not estimated: {error.message}", Verdict.WARN, "watch nvidia-smi during a step")
    except LockstepError as error:
        yield Finding("GPU memory", "unknown", Verdict.FAIL, error.message)


def check_driver(driver: str, cuda: str | None) -> Finding:
    """Checks that the driver is new enough for the CUDA that torch was built for."""
    if not driver:
        fix = "install NVIDIA's driver, or start the container with its GPU runtime (docker run --gpus all)"
        return Finding("driver", "not loaded", Verdict.FAIL, fix)
    oldest = _OLDEST_DRIVER.get((cuda or "").partition(".")[0])
    if oldest and int(driver.partition(".")[0]) < oldest:
        fix = f"install driver {oldest} or newer, or a build of torch for an older CUDA"
        return Finding("driver", f"{driver}, too old for CUDA {cuda}", Verdict.FAIL, fix)
    return Finding("driver", f"{driver}, CUDA {cuda}" if cuda else driver)


def check_compiler(headers: Path) -> Finding:
    """Checks that Triton can compile the code that launches kernels; `headers` is the directory of Python's."""
    named = os.environ.get("CC")
    compiler = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        result = f"CC={named} not found" if named else "neither gcc nor clang found"
        return Finding("compiler", result, Verdict.FAIL, "install gcc; Triton needs it at a kernel's first use")
    if not (headers / "Python.h").is_file():
        fix = f"install Python's headers ({headers.name}-dev), which Triton needs at a kernel's first use"
        return Finding("compiler", f"{compiler}, but no {headers}/Python.h", Verdict.FAIL, fix)
    return Finding("compiler", compiler)


def check_compiled_code(directory: Path, num_gpus: int) -> Finding:
    """Checks that compiled code can be kept in `directory`, and says whether earlier starts have left some."""
    try:
        require_cache("rollout")
    except LockstepError as error:
        return Finding("compiled code", "cannot be kept", Verdict.FAIL, error.message)
    if any(path.is_file() for path in directory.rglob("*")):
        return Finding("compiled code", f"of earlier starts, in {directory}")
    longer = "; the first start on this host takes up to a minute longer" if num_gpus else ""
    return Finding("compiled code", f"none in {directory}{longer}")


def check_memory(config: Config, gpus: Sequence[Gpu]) -> Finding:
    """Checks that the fullest GPU has room for each phase that `lockstep plan` computes, and for the engine's share."""
    model = planned_model(config)
    phases = colocated_phases(config, model, rank_memory(config, model, is_gpu=True).values())
    shown = phases if config.placement == "colocated" else [phase for phase in phases if phase.name == "train"]
    least = min(gpus, key=lambda gpu: gpu.free_bytes)
    share = int(utilization(config) * least.total_bytes)
    needed = {f"to {phase.name}": phase.total for phase in shown} | {"for an engine": share}
    if config.is_side_by_side:
        needed = {"for trainer and engine": share + max(phase.trainer for phase in shown)}
    # The first of the phases that cannot fit at all is named; without one, the largest.
    too_large = (item for item in needed.items() if item[1] > least.total_bytes)
    what, size = next(too_large, max(needed.items(), key=lambda item: item[1]))
    room = f"GPU {least.index} has {_gib(least.free_bytes)} free of {_gib(least.total_bytes)}"
    if size <= least.free_bytes:
        return Finding("GPU memory", f"{room}; {_gib(size)} are needed {what}, and a few GiB that no plan counts")
    fix = "end the other processes on it (nvidia-smi names them), or lower rollout.engine.gpu_memory_utilization"
    if size > least.total_bytes:
        fix = "`lockstep plan --suggest` lists what fits"
    return Finding("GPU memory", f"{room}, and {_gib(size)} are needed {what}", Verdict.FAIL, fix)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


_ROOT = Path(__file__).parents[3]
# Bytes per parameter: master weights, two moments and the weights; for an export the weights alone, at most float32.
_CHECKPOINT_BYTES, _EXPORT_BYTES = 14, 4
_PROBE_TIMEOUT_S = 60.0
_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)")
_NAME = re.compile(r"^[A-Za-z0-9._-]+")


def examine_host(config: AnyConfig | None, addresses: Addresses) -> Iterator[Finding]:
    yield Finding("Python", platform.python_version())
    try:
        gpus = visible_gpus()
    except LockstepError as error:
        yield Finding("GPUs", "unknown", Verdict.FAIL, error.message)
    else:
        locks = sorted((_ROOT / "requirements").glob("*-cuda.txt" if gpus else "cpu*.txt"))
        yield check_packages(locks, "make setup-gpu" if gpus else "make setup")
        yield check_torch(len(gpus))
        if not (addresses.trainer and (addresses.rollout or isinstance(config, SftConfig))):
            yield check_compiled_code(compiled_code(), len(gpus))
        yield check_gpus(config, addresses, gpus)
        yield from examine_gpus(config, addresses, _driver(), _cuda())
    yield check_shared_memory(Path("/dev/shm"))
    if not addresses.rollout and not isinstance(config, SftConfig):
        yield check_sockets()
    yield check_ports(16, _LOCAL_PORTS)
    yield check_disk(config)
    if config:
        yield check_ledger(config.runs_dir)
    if not addresses.reward and not isinstance(config, SftConfig):
        yield check_sandbox(config)


def check_packages(locks: Sequence[Path], setup: str) -> Finding:
    """Checks that no required package is missing and that installed versions are those of the lock files.

    `setup` is the command that installs them.
    """
    installed = {_normalized_name(one.name): one.version for one in distributions()}
    lines = [line for line in distribution("lockstep-rl").requires or () if "extra ==" not in line]
    required = [_normalized_name(name[0]) for line in lines if (name := _NAME.match(line))]
    if missing := sorted(set(required) - installed.keys()):
        return Finding("packages", f"missing: {', '.join(missing)}", Verdict.FAIL, f"run `{setup}`")
    if not locks:
        fix = "use the lock of this release's sources"
        return Finding("packages", "no lock file to compare with", Verdict.WARN, fix)
    lines = [line for lock in locks for line in lock.read_text().splitlines()]
    pinned: dict[str, list[str]] = defaultdict(list)  # the services' locks for GPUs may pin different versions
    for pin in filter(None, map(_PINNED.match, lines)):
        pinned[_normalized_name(pin[1])].append(pin[2])
    other = [
        f"{name} {installed[name]}, not {versions[0]}"
        for name, versions in sorted(pinned.items())
        if installed.get(name, versions[0]) not in versions
    ]
    names = " and ".join(lock.name for lock in locks)
    if other:
        shown = "; ".join(other[:4]) + (f"; and {len(other) - 4} more" if len(other) > 4 else "")
        return Finding("packages", shown, Verdict.WARN, f"install the tested versions from {names}")
    return Finding("packages", f"{len(pinned.keys() & installed.keys())} match {names}")


def check_torch(gpus: int) -> Finding:
    if find_spec("torch") is None:
        return Finding("torch", "not installed here; only trainer and rollout need it")
    import torch

    from services.common.compat.torch import accelerator_libraries

    parts = [torch.__version__, *(f"{name} {version}" for name, version in accelerator_libraries().items())]
    versions = ", ".join([*parts, f"driver {driver}"] if (driver := _driver()) else parts)
    if gpus and not torch.cuda.is_available():
        fix = "install a CUDA build of torch (`make setup-gpu`), and a driver at least as new as its CUDA"
        return Finding("torch", f"{versions}: cannot use the {gpus} GPUs of this host", Verdict.FAIL, fix)
    return Finding("torch", versions)


def check_gpus(config: AnyConfig | None, addresses: Addresses, gpus: Sequence[str]) -> Finding:
    """Checks that there are enough GPUs for the services that a run would start here."""
    if config is not None:
        try:
            split_gpus(
                started_ranks(config, addresses),
                config,
                available=gpus,
                start_rollout=starts_replicas(config, addresses),
            )
        except LockstepError as error:
            return Finding("GPUs", str(len(gpus)), Verdict.FAIL, error.message)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = "" if named is None else f" (CUDA_VISIBLE_DEVICES={named})"
    return Finding("GPUs", f"{len(gpus) or 'none, services run on CPU'}{which}")


def check_shared_memory(path: Path) -> Finding:
    """Checks the size of shared memory, which the processes of an engine use."""
    if not path.is_dir():
        return Finding(str(path), "not mounted", Verdict.FAIL, f"mount a tmpfs at {path}")
    usage = shutil.disk_usage(path)
    room = f"{usage.free / _GIB:.2f} GiB free of {usage.total / _GIB:.2f}"
    if usage.free >= _GIB:
        return Finding(str(path), room)
    # Docker gives a container 64 MiB unless it is told otherwise.
    verdict = Verdict.FAIL if usage.free < _GIB / 16 else Verdict.WARN
    fix = f"start the container with --shm-size=8g; on Kubernetes, mount an emptyDir of medium Memory at {path}"
    return Finding(str(path), room, verdict, fix)


def check_sockets() -> Finding:
    try:
        with socket_directory() as directory:
            return Finding("sockets", f"in {Path(directory).parent}")
    except InvalidInput as error:
        return Finding("sockets", "cannot be made", Verdict.FAIL, error.message)


def check_ports(count: int, local_ports: Path) -> Finding:
    """Checks that services can get ports, and that outgoing connections do not use the same range."""
    span = f"{PORTS.start} to {PORTS.stop - 1}"
    try:
        with ExitStack() as holders:
            for _ in range(count):
                hold_free_port("127.0.0.1", holders)
    except OSError as error:
        fix = f"stop the processes that listen on ports {span}, or start the services yourself"
        return Finding("ports", str(error), Verdict.FAIL, fix)
    first, last = map(int, local_ports.read_text().split())
    if first < PORTS.stop and last >= PORTS.start:
        fix = f"sysctl net.ipv4.ip_local_port_range='{PORTS.stop} 60999'"
        return Finding("ports", f"outgoing connections use {first} to {last}, services {span}", Verdict.WARN, fix)
    return Finding("ports", f"{count} free from {span}")


def check_disk(config: AnyConfig | None) -> Finding:
    """Checks that the disk has room for the checkpoints that a run keeps, plus the one being written."""
    there = _existing(config.run_dir if config else Path("runs"))
    free, needed = shutil.disk_usage(there).free, bytes_needed(config) if config else 0
    room = f"{free / _GIB:.1f} GiB free at {there}"
    if config:
        room += f"; the run needs {needed / _GIB:.2f}" if needed else "; the model's size is not known here"
    if free >= 2 * max(needed, 5 * _GIB):
        return Finding("disk", room)
    fix = "free space, set runs_dir to a larger disk, or lower checkpoint.max_ckpts_to_keep"
    return Finding("disk", room, Verdict.FAIL if free < max(needed, _GIB) else Verdict.WARN, fix)


def _existing(directory: Path) -> Path:
    directory = directory.absolute()
    return next(path for path in (directory, *directory.parents) if path.is_dir())


def check_ledger(runs_dir: Path) -> Finding:
    """Checks that a ledger can be written and read in `runs_dir`, with one that it deletes again."""
    there = _existing(runs_dir)
    try:
        with (
            tempfile.TemporaryDirectory(dir=there, prefix=".lockstep-doctor-") as probe,
            closing(Ledger(Path(probe) / LEDGER)) as ledger,
        ):
            ledger.record(Kind.EPOCH)
            with closing(LedgerReader(Path(probe))) as reader:
                ledger.record(Kind.EPOCH)
                if reader.num_rows() != 2:
                    raise DataLoss(f"a reader in {there} does not see what was written")
    except (LockstepError, OSError) as error:
        message = error.message if isinstance(error, LockstepError) else str(error)
        return Finding("ledger", message, Verdict.FAIL, "set runs_dir to a local disk, or one with working file locks")
    if has_local_locks(there):
        fix = "mount it with NFS 4, or without nolock and local_lock: two hosts could write one run"
        return Finding("ledger", f"{there} is on NFS whose locks other hosts do not see", Verdict.FAIL, fix)
    if is_shared(there):
        return Finding("ledger", f"{there} is on a network file system or FUSE: SQLite keeps a rollback journal there")
    return Finding("ledger", f"SQLite keeps a write-ahead log in {there}")


def check_sandbox(config: AnyConfig | None, command: Sequence[str] = SANDBOX) -> Finding:
    """Checks that programs from samples can run in a sandbox; code scorers, python tools and agents need it."""
    why = problem(command, {}, _PROBE_TIMEOUT_S)
    if not why:
        return Finding("sandbox", "bubblewrap runs")
    fix = "apt-get install bubblewrap, and allow user namespaces; only code scorers, python tools and agents need it"
    return Finding("sandbox", why, Verdict.FAIL if _needs_sandbox(config) else Verdict.WARN, fix)


def _needs_sandbox(config: AnyConfig | None) -> bool:
    if not isinstance(config, Config):
        return False
    environment = config.environment
    tools = environment.tools if environment and environment.kind == "tools" else ()
    if environment and environment.kind == "agent" and environment.command:
        return True
    has_code = any(scorer.kind == "code" for scorer in config.reward.scorers)
    return has_code or any(tool.kind == "python" for tool in tools)


def bytes_needed(config: AnyConfig) -> int:
    """Returns the bytes of a run's checkpoints; 0 if a model is on another host or its parameters are not known."""
    settings = config.checkpoint
    try:
        model = planned_model(config)
        critic = sized_model(config, "critic", model)
    except LockstepError:
        return 0
    more = 2 if settings.keep_best else 1  # one is written before one goes, and the best stays
    own = trained_parameters(config.trainer, model) if config.trainer.lora.rank else model.num_parameters
    saved = own * (settings.max_ckpts_to_keep + more)
    if critic:
        saved += critic[1].num_parameters * (settings.max_critic_ckpts_to_keep + more)
    exported = model.num_parameters * _EXPORT_BYTES if settings.export_at_end else 0
    return (saved * _CHECKPOINT_BYTES if settings.save_freq else 0) + exported


def _cuda() -> str | None:
    """Returns the version of CUDA that torch was built for; None without torch, or for a CPU build."""
    if find_spec("torch") is None:
        return None
    import torch

    return torch.version.cuda


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    version = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.is_file() else None
    return version[0] if version else ""


def _normalized_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
