"""Runs the manifests of deploy/k8s as containers of one Docker engine, for test_kubernetes.sh. It is no Kubernetes.

`kubelet.py --docker DOCKER --root ROOT [--replicas NAME=N] [--env NAME=VALUE] [--arg ARG] MANIFEST...` starts the pods
of StatefulSets, Deployments and Jobs and keeps them running until it is ended. What it does as a kubelet does:

- A pod is a container that holds network, IPC and, if shared, processes; the others join it. Its names are POD.SERVICE
  and SERVICE, and it keeps its address when another container is started again.
- Claims, secrets and config maps are directories of ROOT: claims/NAME, secrets/NAME and configs/NAME.
- Startup and liveness probes run as their manifests say; a container whose probe fails too often is killed. One that
  ends is started again after five seconds; so is a Job, as its failure policy says.

Each line of its output says what ended: POD.CONTAINER and the exit code.
"""

import argparse
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

BACKOFF_S = 5.0
NETWORK = "kubelet"


class Engine:
    """Calls Docker's command line."""

    def __init__(self, command: str):
        self._command = command

    def call(self, *args: str) -> tuple[int, str]:
        """Returns the exit code and the output."""
        done = subprocess.run((self._command, *args), capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.strip() or done.stderr.strip()


class Pod:
    """One pod of a workload, with a thread for each container."""

    def __init__(self, engine: Engine, options: argparse.Namespace, workload: dict[str, Any], index: int):
        self.service: str = workload["metadata"]["name"]
        self.name = f"{self.service}-{index}"
        self.spec: dict[str, Any] = workload["spec"]["template"]["spec"]
        self._job = workload["spec"] if workload["kind"] == "Job" else None
        self._engine, self._options, self._index = engine, options, index
        self._lock = threading.Lock()

    def start(self) -> Iterator[threading.Thread]:
        for container in self.spec["containers"]:
            thread = threading.Thread(target=self._keep_running, args=(container,))
            thread.start()
            yield thread

    def _keep_running(self, container: dict[str, Any]) -> None:
        name, num_failures = f"{self.name}.{container['name']}", 0
        while True:
            self._make_sandbox()
            self._engine.call("rm", "--force", name)
            code, output = self._engine.call("run", "--detach", "--name", name, *self._flags(container))
            if code:
                say(f"{name} did not start: {output}")
                return
            threading.Thread(target=self._probe, args=(name, output, container), daemon=True).start()
            code = int(self._engine.call("wait", name)[1].splitlines()[-1])
            say(f"{name} exit {code}: {self._engine.call('logs', '--tail', '1', name)[1]}")
            if self._job:
                num_failures += code not in (0, *self._ignored())
                if code == 0 or num_failures > self._job["backoffLimit"]:
                    say(f"{self.service} {'complete' if code == 0 else 'failed'}")
                    return
            time.sleep(BACKOFF_S)

    def _ignored(self) -> Iterator[int]:
        assert self._job
        for rule in self._job["podFailurePolicy"]["rules"]:
            yield from rule.get("onExitCodes", {}).get("values", ())

    def _make_sandbox(self) -> None:
        """Starts the container that holds the pod's namespaces, unless it runs."""
        with self._lock:
            if self._engine.call("inspect", "--format", "{{.State.Running}}", self.name)[1] == "true":
                return
            self._engine.call("rm", "--force", self.name)
            aliases = [f"--network-alias={alias}" for alias in (self.service, f"{self.name}.{self.service}")]
            flags = (f"--network={NETWORK}", *aliases, "--ipc=shareable", "--shm-size=1g", "--init")
            code, output = self._engine.call(
                "run", "--detach", "--name", self.name, *flags, self._options.pause, "sleep", "inf"
            )
            assert code == 0, output

    def _flags(self, container: dict[str, Any]) -> list[str]:
        """Returns what follows `docker run` for a container, in the words of its manifest."""
        security = self.spec["securityContext"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        flags = [f"--{kind}=container:{self.name}" for kind in ("network", "ipc")]
        flags += [f"--pid=container:{self.name}"] if self.spec.get("shareProcessNamespace") else ["--init"]
        flags += [f"--user={security['runAsUser']}", f"--group-add={security['fsGroup']}"]
        flags += ["--cap-drop=ALL", "--security-opt=no-new-privileges", "--no-healthcheck"]
        if work := container.get("workingDir"):
            flags.append(f"--workdir={work}")
        env = {entry["name"]: entry.get("value", str(self._index)) for entry in container.get("env", ())}
        env |= {name: value for name, value in self._options.env if name in env}
        flags += [f"--env={name}={value}" for name, value in env.items()]
        for mount in container["volumeMounts"]:
            if source := self._source(mount["name"]):
                flags.append(f"--volume={source}:{mount['mountPath']}{':ro' * mount.get('readOnly', False)}")
        args = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], arg) for arg in container.get("args", ())]
        args += self._options.arg if self._job else []
        return [*flags, container["image"] + ":cpu", *args]

    def _source(self, volume: str) -> str | None:
        """Returns the directory of a volume; None if the sandbox has it, which is so for /dev/shm."""
        (found,) = [each for each in self.spec["volumes"] if each["name"] == volume]
        match found:
            case {"secret": {"secretName": name}}:
                return f"{self._options.root}/secrets/{name}"
            case {"configMap": {"name": name}}:
                return f"{self._options.root}/configs/{name}"
            case {"persistentVolumeClaim": {"claimName": name}}:
                return f"{self._options.root}/claims/{name}"
        return None

    def _probe(self, name: str, started: str, container: dict[str, Any]) -> None:
        """Kills the container `started` if its startup probe or then its liveness probe fails too often."""
        for kind in ("startupProbe", "livenessProbe"):
            probe, failures = container.get(kind), 0
            while probe:
                time.sleep(probe["periodSeconds"])
                if self._engine.call("inspect", "--format", "{{.Id}} {{.State.Running}}", name)[1] != f"{started} true":
                    return
                limited = ("timeout", str(probe["timeoutSeconds"]), *probe["exec"]["command"])
                code, _ = self._engine.call("exec", name, *limited)
                failures = failures + 1 if code else 0
                if failures >= probe["failureThreshold"]:
                    say(f"{name} is killed: its {kind} failed {failures} times")
                    self._engine.call("kill", name)
                    return
                if code == 0 and kind == "startupProbe":
                    say(f"{name} has started")
                    break


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--docker", required=True)
    parser.add_argument("--root", required=True, help="as the engine sees it")
    parser.add_argument("--pause", default="python:3.11-slim-bookworm", help="image of the container that holds a pod")
    parser.add_argument("--replicas", type=pair, action="append", default=[])
    parser.add_argument("--env", type=pair, action="append", default=[])
    parser.add_argument("--arg", action="append", default=[], help="a further argument of the Job's command")
    parser.add_argument("manifest", type=Path, nargs="+")
    options = parser.parse_args()
    engine, replicas = Engine(options.docker), dict(options.replicas)
    documents = [each for path in options.manifest for each in yaml.safe_load_all(path.read_text())]
    threads: list[threading.Thread] = []
    for workload in documents:
        if workload["kind"] in ("StatefulSet", "Deployment", "Job"):
            count = int(replicas.get(workload["metadata"]["name"], workload["spec"].get("replicas", 1)))
            for index in range(count):
                threads += Pod(engine, options, workload, index).start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
