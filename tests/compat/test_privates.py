"""Tests that only the compat packages use or change private parts of third-party libraries."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.test_source import SOURCES, parse

OURS = {"services", "lockstep"}
PYTHONS = sys.stdlib_module_names | {"_xxsubinterpreters"}  # Python 3.11 has this module, but does not list it


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_foreign(module: str) -> bool:
    """Returns whether a module is neither ours nor the standard library's."""
    return module.split(".")[0] not in OURS | PYTHONS


def imported(tree: ast.AST) -> dict[str, str]:
    """Returns the names that imports bind, with the modules that they come from."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def root_of(node: ast.expr) -> str:
    """Returns the name that a chain of attributes begins with, "" if it begins with something else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def own_names(tree: ast.AST) -> set[str]:
    """Returns the names that the module itself defines: of functions, classes, annotated attributes and on self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root_of(node) == "self":
            names.add(node.attr)
    return names


def is_own_object(node: ast.expr) -> bool:
    """Returns whether an expression is self, cls or super()."""
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


def violations(tree: ast.AST) -> Iterator[str]:
    names, own = imported(tree), own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            full = [f"{module}.{alias.name}" if module else alias.name for alias in node.names]
            yield from (f"line {node.lineno}: import {f}" for f in full if is_foreign(f) and is_private_path(f))
        if not isinstance(node, ast.Attribute):
            continue
        origin = names.get(root_of(node), "")
        # If the origin of a value is unknown, as that of a call's result, any private name that this module does not
        # define counts as foreign.
        is_foreign_value = is_foreign(origin) if origin else not is_own_object(node.value) and node.attr not in own
        if is_private(node.attr) and is_foreign_value:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node.ctx, ast.Store | ast.Del) and origin and is_foreign(origin):
            yield f"line {node.lineno}: {ast.unparse(node)} is set"
        if isinstance(node.ctx, ast.Store) and node.attr == "__class__":
            yield f"line {node.lineno}: {ast.unparse(node)} is set"


def is_private_path(path: str) -> bool:
    return any(map(is_private, path.split(".")))


def is_compat(path: Path) -> bool:
    return "compat" in path.relative_to(ROOT).with_suffix("").parts


def test_only_compat_uses_what_is_private_in_libraries() -> None:
    found = {str(path): list(violations(parse(path))) for path in SOURCES if not is_compat(path)}
    assert {path: uses for path, uses in found.items() if uses} == {}


def test_compat_knows_nothing_of_its_service() -> None:
    for path in filter(is_compat, SOURCES):
        ours = [module for module in imported(parse(path)).values() if module.startswith("services.")]
        assert all(module.startswith("services.common.") or ".compat." in module for module in ours), path


@pytest.mark.parametrize(
    "line",
    [
        "import torch; torch._foreach_copy_([], [])",
        "import torch; x = torch.cuda.memory._snapshot()",
        "from torch.utils._pytree import tree_leaves",
        "from torch._C import Generator",
        "import torch._dynamo",
        "from vllm.v1.engine import _x",
        "import torch; torch.Tensor.cuda = None",
        "from sympy.parsing import sympy_parser; sympy_parser.parse_expr = None",
        "import torch.distributed as dist; dist.ProcessGroupGloo._Options()",
        "x = make(); x._timeout = 1",
        "x = make(); print(x.storage()._cdata)",
        "def f(module): module.__class__ = int",
    ],
)
def test_the_rule_finds(line: str) -> None:
    assert list(violations(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "import os; os._exit(0)",
        "from collections import _chain",
        "class A:\n    def __init__(self): self._x = 1\n    def same(self, other): return other._x",
        "class A:\n    def f(self): super()._check()",
        "import torch; torch.manual_seed(0)",
        "x = make(); x.lr = 1",
        "import torch; y = torch.float32.__class__",
    ],
)
def test_the_rule_lets_be(line: str) -> None:
    assert not list(violations(ast.parse(line)))
