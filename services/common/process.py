"""Sets up service processes: their packages, log, limits and directory for sockets; and ends them with their parent."""

import ctypes
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import services
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.telemetry import LogFormat, formatter

_GRACE_S = 10.0
_CUDA_NOT_INITIALIZED = 3
# Enough for every service. Some programs visit every descriptor that they may have, so there is no use in more.
_MAX_DESCRIPTORS = 65_536
# Variables that name the directories of compiled code, and the part of `compiled_code` for each.
_CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "torch"}


def configure_logging(service: str, kind: LogFormat = "text") -> None:
    """Logs to stderr, one line per record, with time, level and service."""
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(formatter(kind, service))
    logging.basicConfig(level=logging.INFO, handlers=[to_stderr], force=True)
    for name in ("httpx", "httpx2", "mcp"):  # a line for each request, with its whole URL and what is secret in it
        logging.getLogger(name).setLevel(logging.WARNING)


def own_log() -> str:
    """Returns the path of the file that this process's stderr goes to; "" if that is not a file."""
    path = os.readlink("/proc/self/fd/2")
    return path if os.path.isfile(path) else ""


def keep_files_private() -> None:
    """Makes files of this process and its children accessible to their owner only: batches have prompts and answers."""
    os.umask(os.umask(0o077) | 0o077)


def call_loopback_directly() -> None:
    """Keeps HTTP clients of this process and its children from calling this host through a proxy of the environment."""
    names = ("no_proxy", "NO_PROXY")
    hosts = [host for name in names for host in os.environ.get(name, "").split(",") if host]
    if hosts != ["*"]:  # which is all hosts, only as the whole value
        os.environ.update(dict.fromkeys(names, ",".join(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"]))))


def open_standard_streams() -> None:
    """Opens /dev/null in place of standard streams that were closed, whose numbers a connection would get."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free
            setattr(sys, name, open(descriptor, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def compiled_code() -> Path:
    """Returns the directory in which vLLM, Triton and torch keep what they compile, for later starts on this host."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lockstep")


def keep_compiled_code() -> None:
    """Makes vLLM, Triton and torch use this directory, by variables that they read when they compile; those that are
    set stay."""
    for name, part in _CACHES.items():
        os.environ.setdefault(name, str(compiled_code() / part))


def require_cache(service: str) -> None:
    """Checks that the compiled code of a service can be kept. Makes no directory.

    Raises:
        PreconditionFailed: This user cannot write to a directory, or has no home. An import of torch would fail later.
    """
    for name, part in _CACHES.items():
        directory = Path(os.environ.get(name) or compiled_code() / part)
        place = next((path for path in (directory, *directory.parents) if os.path.exists(path)), directory)
        is_writable = directory.is_absolute() and place.is_dir() and os.access(place, os.W_OK)
        if not is_writable and (service, part) != ("trainer", "vllm"):
            raise PreconditionFailed(
                f"compiled code cannot be kept in {directory}: set XDG_CACHE_HOME, or {name} alone, to a directory "
                "that this user can write to"
            )


def import_before_fork(*modules: str) -> None:
    """Imports modules for processes that will be forked from this one.

    Garbage collection is off during the imports, because it would take an eighth of their time. The imported objects
    are never collected either, because a collection in a fork would copy all their pages. torch is told to count GPUs
    without initializing CUDA, which a fork could not use any more.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    keep_compiled_code()
    gc.disable()
    for module in modules:
        import_module(module)
    gc.freeze()
    gc.enable()


def may_fork() -> bool:
    """Returns whether a fork of this process could use CUDA, which works only if nothing here has initialized it yet.

    Reason: torch knows only of its own use of CUDA. The driver refuses this call until somebody has initialized it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # a host without a GPU
        return True
    return driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) == _CUDA_NOT_INITIALIZED


def allow_descriptors() -> None:
    """Raises the number of descriptors that this process may have, as far as its hard limit allows, to 65,536.

    The usual soft limit of 1,024 is there for programs that call select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MAX_DESCRIPTORS)), hard))


def exit_with(pid: int) -> None:
    """Ends this process when process `pid` ends: with SIGTERM, or with os._exit if it still runs 10 s later."""
    try:
        watched = os.pidfd_open(pid)  # unlike a number, it can never mean another process
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(watched, select.POLLIN)
        poller.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name=f"exit-with-{pid}", daemon=True).start()


# Modules of the packages in each extra of pyproject.toml.
MODULES = {
    "reward": ("aiohttp", "bm25s", "math_verify", "sympy"),
    "reward-model": ("safetensors", "torch", "transformers"),
    "rollout": ("psutil", "torch", "transformers", "vllm"),
    "trainer": ("accelerate", "psutil", "safetensors", "setproctitle", "torch", "transformers", "zmq"),
}

# What vLLM needs for suffix decoding. It is no extra, because it has no wheels and must be compiled.
_SUFFIX = ("arctic-inference", "0.1.1")


def missing_modules(extra: str) -> list[str]:
    return [name for name in MODULES.get(extra, ()) if find_spec(name) is None]


def require_extra(service: str) -> None:
    """Checks that the extra of `service` is installed, that the working directory has no package `services`, and that
    compiled code can be kept.

    `python -m services.<service>` would import a package `services` of the working directory in place of Lockstep's.
    """
    if missing := missing_modules(service):
        raise PreconditionFailed(
            f"the {service} service cannot run here without {', '.join(missing)}: pip install 'lockstep-rl[{service}]'",
            reason=Reason.UNSUPPORTED_VERSION,
            library=missing[0],
        )
    own = Path(services.__file__).parent
    for hiding in (Path.cwd() / "services" / "__init__.py", Path.cwd() / "services.py"):
        if hiding.exists() and not hiding.parent.samefile(own):
            raise PreconditionFailed(
                f"{hiding} hides Lockstep's own package `services`: run in another directory",
                reason=Reason.UNSUPPORTED_VERSION,
            )
    if service != "reward":  # which compiles nothing
        require_cache(service)


def require_suffix_decoding() -> None:
    """Checks that the package for suffix decoding is installed, in the version that was tested."""
    package, tested = _SUFFIX
    try:
        installed = version(package)
    except PackageNotFoundError:
        installed = ""
    if installed != tested:
        raise PreconditionFailed(
            f"rollout.speculation.kind suffix: host {socket.gethostname()} has "
            f"{f'{package} {installed}' if installed else f'no {package}'}; every replica's host needs version "
            f"{tested}: pip install {package}=={tested}",
            reason=Reason.UNSUPPORTED_VERSION,
            library=package,
            installed=installed,
            supported=f"=={tested}",
        )


# The longest name of a socket that is made in such a directory: vLLM's are 36 characters.
_SOCKET_NAME = "s" * 36
# Not first the user's runtime directory: it is removed when the user logs out.
_SHORT_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run")


def socket_directory() -> "tempfile.TemporaryDirectory[str]":
    """Makes a directory that only this user can enter and in which sockets can be made.

    It is in the directory for temporary files or, if sockets cannot be made there because its path is too long for
    example, in /tmp or another place with a short path.
    """
    places = (tempfile.gettempdir(), os.environ.get("TMPDIR"), *_SHORT_PLACES, os.environ.get("XDG_RUNTIME_DIR"))
    refused: list[str] = []
    for place in dict.fromkeys(filter(None, places)):
        try:
            directory = tempfile.TemporaryDirectory(prefix="lockstep-", dir=place)
        except OSError as error:
            refused.append(f"{place}: {error.strerror or error}")
            continue
        try:
            _try_socket(os.path.join(directory.name, _SOCKET_NAME))
        except OSError as error:
            directory.cleanup()
            refused.append(f"{place}: {error.strerror or error}")
        else:
            return directory
    raise InvalidInput(
        "TMPDIR: an engine's processes meet at Unix sockets, and none can be made here; set TMPDIR to a directory that "
        f"this user can write to, with a path of at most 50 characters ({'; '.join(refused)})",
        field="TMPDIR",
    )


def _try_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(path)
    os.unlink(path)
