"""Tests rules for the source: nothing runs foreign code, functions and files are small, stubs are as generated."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT

SOURCES = sorted((ROOT / "services").rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ARGUMENTS = 400, 60, 6
# A smaller module joins the one of its folder that alone imports it, except those that must stay apart.
MIN_FILE_LINES = 80
APART = {
    "services.common.weights.digest_gpu": "imports triton",
    "services.trainer.merging_gpu": "imports triton",
    "services.rollout.metrics": "its metrics are listed without vLLM",
    "services.coordinator.rl.loop": "the loop alone on a page",
}

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
# Limits what torch itself would unpickle.
ALLOWED = {"services/trainer/compat/torch_checkpoint.py": ("import pickle", "torch.load(")}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "print",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "torch.save",
    "yaml.unsafe_load",
    "yaml.full_load",
}
FORBIDDEN_ARGUMENTS = {("shell", True), ("trust_remote_code", True), ("weights_only", False)}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def violations(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for name in _imported(node):
            if name.split(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_CALLS:
                yield f"line {node.lineno}: import {name}"
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        if name in FORBIDDEN_CALLS:
            yield f"line {node.lineno}: {name}("
        if name.endswith("_pyobj") or name.endswith("_object_list"):  # ZeroMQ's and torch.distributed's pickling
            yield f"line {node.lineno}: {name}("
        for keyword in node.keywords:
            if isinstance(keyword.value, ast.Constant) and (keyword.arg, keyword.value.value) in FORBIDDEN_ARGUMENTS:
                yield f"line {node.lineno}: {keyword.arg}={keyword.value.value}"


def functions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Yields the name, the number of lines and the number of arguments without self of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(1 for argument in named if argument.arg not in ("self", "cls"))
            is_kernel = any(_dotted(decorator) == "triton.jit" for decorator in node.decorator_list)  # pointers, sizes
            yield node.name, node.end_lineno - node.lineno + 1, 0 if is_kernel else count


@cache
def parse(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_source_keeps_the_rules() -> None:
    wrong = {}
    for path in SOURCES:
        tree, num_lines = parse(path), len(path.read_text(encoding="utf-8").splitlines())
        large = [f for f in functions(tree) if f[1] > MAX_FUNCTION_LINES or f[2] > MAX_ARGUMENTS]
        name = str(path.relative_to(ROOT))
        forbidden = [found for found in violations(tree) if not found.endswith(ALLOWED.get(name, ()))]
        if found := [*forbidden, *large, *[num_lines] * (num_lines > MAX_FILE_LINES)]:
            wrong[name] = found
    assert wrong == {}


def lone_modules(sources: dict[str, str]) -> set[str]:
    """Returns the modules under MIN_FILE_LINES that are imported by one module only, which is in their folder.

    `sources` has the text of each module by its dotted name. Modules that a string names, as a command does with
    `python -m`, are left out.
    """
    importers: dict[str, set[str]] = {name: set() for name in sources}
    named = set()
    for importer, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            for name in _imported(node):
                if name in importers and name != importer:
                    importers[name].add(importer)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in importers:
                named.add(node.value)
    return {
        name
        for name, by in importers.items()
        if len(by) == 1
        and next(iter(by)).rpartition(".")[0] == name.rpartition(".")[0]
        and name not in named
        and not name.endswith(("__init__", "__main__"))
        and len(sources[name].splitlines()) < MIN_FILE_LINES
    }


def test_small_modules_join_the_only_one_that_imports_them() -> None:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}
    sources = {name: path.read_text(encoding="utf-8") for path, name in names.items()}
    assert sorted(lone_modules(sources) - set(APART)) == []


@pytest.mark.parametrize(
    ("others", "is_lone"),
    [
        ({"a.user": "from a.small import x"}, True),
        ({"a.user": "from a import small"}, True),
        ({"a.user": "import a.small", "a.other": "import a.small"}, False),
        ({"b.user": "import a.small"}, False),
        ({"a.user": "import a.small; run('a.small')"}, False),
        ({}, False),
    ],
)
def test_the_rule_sees_what_must_join(others: dict[str, str], is_lone: bool) -> None:
    assert lone_modules({"a.small": "x = 1", **others}) == ({"a.small"} if is_lone else set())


def test_files_of_tests_and_benchmarks_are_as_short() -> None:
    files = [file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    assert [file for file in files if len(file.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES] == []


def test_only_one_module_makes_consoles() -> None:
    makes = re.compile(r"(?<!def )\bConsole\(|\(Console\b")
    found = {path.name for path in SOURCES if makes.search(path.read_text(encoding="utf-8"))}
    assert found == {"console.py"}  # others would read names such as reward[level=1] as markup


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as c",
        "eval(x)",
        "exec(x)",
        "import os; os.system(x)",
        "from os import system",
        "subprocess.run(x, shell=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "print(x)",
        "torch.load(x)",
        "socket.recv_pyobj()",
        "dist.broadcast_object_list([x])",
    ],
)
def test_rule_sees_what_it_forbids(source: str) -> None:
    assert list(violations(ast.parse(source)))
    assert not list(violations(ast.parse("model.eval(); re.compile(x); evaluate(x); console.print(x)")))


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 50


def test_common_and_the_services_import_only_what_they_may() -> None:
    """Repeats a check of import-linter, for those who run the tests only."""
    services = ("rollout", "trainer", "reward", "coordinator")
    for path in SOURCES:
        owner = path.relative_to(ROOT / "services").parts[0]
        others = [name for name in services if name != owner]
        imported = [name for node in ast.walk(parse(path)) for name in _imported(node)]
        bad = [name for name in imported if re.match(rf"services\.({'|'.join(others)})\b", name)]
        assert not bad, f"{path}: {bad}"


def test_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python", "mypy_grpc")]
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I",
        "protos",
        f"--plugin=protoc-gen-mypy_grpc={plugin}",
        *out,
        *(str(p.relative_to(ROOT)) for p in protos),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    generated = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*.py*") if file.is_file()}
    committed = {
        file.relative_to(ROOT / "protos"): file.read_bytes()
        for file in (ROOT / "protos").rglob("*_pb2*.py*")
        if file.suffix in (".py", ".pyi")
    }
    assert len(generated) == 4 * len(protos)
    assert generated == committed
