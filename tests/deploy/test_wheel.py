"""Tests that the wheel has exactly the files that the services read, and that missing packages are named."""

import sys
import tomllib
import zipfile
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from services.common import process as extras
from services.common.compat import BUILDS
from services.common.errors import PreconditionFailed
from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    directory = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return zipfile.ZipFile(directory / import_module("hatchling.build").build_wheel(str(directory)))


def test_it_has_the_services_and_their_interface(wheel: zipfile.ZipFile) -> None:
    own = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = [path for path in (ROOT / "services").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    interface = [path for path in (ROOT / "protos" / "lockstep").rglob("*") if path.suffix in (".py", ".pyi", ".proto")]
    assert own == {
        *(str(path.relative_to(ROOT)) for path in sources),
        *(str(path.relative_to(ROOT / "protos")) for path in interface),
    }
    assert "services/coordinator/observe/report/page.html" in own


def test_every_command_is_in_it(wheel: zipfile.ZipFile) -> None:
    for name, target in PROJECT["scripts"].items():
        module = target.partition(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & set(wheel.namelist()), name


@pytest.mark.parametrize("service", extras.MODULES)
def test_an_extra_is_checked_by_its_modules(service: str) -> None:
    builds = {build: name for name, of_name in BUILDS.items() for build in of_name}
    distributions = packages_distributions()
    installed = {canonicalize_name(distributions[module][0]) for module in extras.MODULES[service]}
    named = {canonicalize_name(Requirement(line).name) for line in PROJECT["optional-dependencies"][service]}
    assert {builds.get(name, name) for name in installed} == named - {"lockstep-rl"}


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    extras.require_extra("trainer")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(
        PreconditionFailed, match=r"trainer .* without torch, zmq: pip install 'lockstep-rl\[trainer\]'"
    ):
        extras.require_extra("trainer")
    extras.require_extra("coordinator")


def test_another_package_of_the_same_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "services").mkdir()
    extras.require_extra("reward")  # a directory without __init__.py hides no package
    (tmp_path / "services" / "__init__.py").touch()
    with pytest.raises(PreconditionFailed, match="hides Lockstep's own package"):
        extras.require_extra("reward")
