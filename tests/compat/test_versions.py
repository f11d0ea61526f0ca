"""Tests that the supported versions agree with pyproject.toml and the locks, and that other versions are refused."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from services.common import compat as versions
from services.common import process as extras
from services.common.compat import BUILDS, SUPPORTED, require_version
from services.common.errors import PreconditionFailed, Reason
from tests.support import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> None:
    require_version.cache_clear()


@pytest.mark.parametrize("library", SUPPORTED)
def test_bounds_are_those_of_the_extras(library: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for extra in project["optional-dependencies"].values() for text in extra]
    bounds = {requirement.specifier for requirement in asked if requirement.name == library}
    assert bounds == {SpecifierSet(SUPPORTED[library])}
    assert any(bound.operator == "<" for bound in SpecifierSet(SUPPORTED[library]))


@pytest.mark.parametrize("library", SUPPORTED)
def test_locks_are_within_the_bounds(library: str) -> None:
    names = "|".join(BUILDS.get(library, (library,)))
    locked = [v for lock in LOCKS for v in re.findall(rf"^(?:{names})==([^\s\\;]+)", lock.read_text(), re.MULTILINE)]
    assert locked
    assert all(SpecifierSet(SUPPORTED[library]).contains(Version(version)) for version in locked)


def test_the_lock_of_suffix_decoding_has_what_the_service_asks_for() -> None:
    (line,) = re.findall(r"^[\w-]+==\S+", (ROOT / "requirements" / "suffix.txt").read_text(), re.MULTILINE)
    assert line == "==".join(extras._SUFFIX)


@pytest.mark.parametrize("library", SUPPORTED)
def test_what_is_installed_here_is_accepted(library: str) -> None:
    assert Version(require_version(library))


@pytest.mark.parametrize("found", ["2.11.0", "2.11.0+cu130", "2.11.0a0+git70d99e9", "2.13.0+cpu", "2.13.1.dev20260101"])
def test_builds_of_a_supported_version_are_accepted(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: found)
    assert require_version("torch") == found


@pytest.mark.parametrize("found", ["2.9.1", "2.14.0", "3.0"])
def test_another_version_is_refused_with_what_is_supported(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: found)
    with pytest.raises(PreconditionFailed, match=rf"torch {re.escape(found)} is installed.*>=2\.10,<2\.14") as caught:
        require_version("torch")
    assert caught.value.reason is Reason.UNSUPPORTED_VERSION
    assert caught.value.metadata == {"library": "torch", "installed": found, "supported": SUPPORTED["torch"]}


def test_what_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILDS, "vllm", ("no-such-distribution",))
    with pytest.raises(PreconditionFailed, match=r"vllm is not installed, .*: pip install 'lockstep-rl\[rollout\]'$"):
        require_version("vllm")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILDS, "mbridge", ("no-such-distribution",))
    with pytest.raises(
        PreconditionFailed, match=r"mbridge is not installed, .*: pip install 'lockstep-rl\[mbridge\]'$"
    ):
        require_version("mbridge")
