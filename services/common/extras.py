"""Checks that a service's packages are installed before they are imported. Without extras, only the coordinator
runs."""

import socket
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import services
from services.common.errors import PreconditionFailed, Reason

# Modules of the packages in each extra of pyproject.toml.
MODULES = {
    "reward": ("aiohttp", "bm25s", "math_verify", "sympy"),
    "reward-model": ("safetensors", "torch", "transformers"),
    "rollout": ("psutil", "torch", "transformers", "vllm"),
    "trainer": ("accelerate", "psutil", "safetensors", "torch", "transformers", "zmq"),
}

# What vLLM needs for suffix decoding. It is no extra, because it has no wheels and must be compiled.
_SUFFIX = ("arctic-inference", "0.1.1")


def missing_modules(extra: str) -> list[str]:
    """Returns the modules of an extra that are not installed."""
    return [name for name in MODULES.get(extra, ()) if find_spec(name) is None]


def require_extra(service: str) -> None:
    """Checks that the extra of `service` is installed, and that nothing else is imported in place of Lockstep.

    Raises:
        PreconditionFailed: UNSUPPORTED_VERSION. A module of the extra is missing, or the working directory has a
            package `services`, which `python -m services.<service>` would import instead.
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


def require_suffix_decoding() -> None:
    """Checks that the package for suffix decoding is installed.

    Raises:
        PreconditionFailed: UNSUPPORTED_VERSION. It is missing, or its version was not tested.
    """
    package, tested = _SUFFIX
    try:
        found = version(package)
    except PackageNotFoundError:
        found = ""
    if found != tested:
        raise PreconditionFailed(
            f"rollout.speculation.kind suffix: host {socket.gethostname()} has "
            f"{f'{package} {found}' if found else f'no {package}'}; every replica's host needs version {tested}: "
            f"pip install {package}=={tested}",
            reason=Reason.UNSUPPORTED_VERSION,
            library=package,
            installed=found,
            supported=f"=={tested}",
        )
