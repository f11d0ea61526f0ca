"""Builds the Dockerfiles' `cpu` targets without Docker, then runs compose.yaml's quickstart with the result.

Run `python deploy/replay.py ROOT [--steps N] [--wheels DIR]` as root on Debian 12 with Python 3.11 and bubblewrap. Each
stage has its own file system below ROOT, plus this host's /usr and /etc, read-only. apt-get packages are taken from
this host. Python packages are taken from DIR too, for sites that cannot reach every package index.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

_REPOSITORY = Path(__file__).parents[1]
_SERVICES = ("coordinator", "reward", "rollout", "trainer")
# Every container has its own loopback address, because all of them use the same port.
_HOSTS = {"rollout": "127.0.0.2", "reward": "127.0.0.3", "trainer": "127.0.0.4"}
_END_S = 30
_FROM_HOST = ("/usr", "/etc", "/sys", "/bin", "/sbin", "/lib", "/lib64", sys.base_prefix)


@dataclass
class Stage:
    """Holds one stage of a Dockerfile: its file system, and what ENV, WORKDIR, ENTRYPOINT and CMD have set."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    volumes: dict[str, Path] = field(default_factory=dict)

    def path(self, inside: str) -> Path:
        """Returns the path on this host of a path in the stage."""
        return self.root / str(Path(self.workdir) / inside).lstrip("/")

    def sandboxed(self, command: Iterable[str]) -> list[str]:
        """Returns the command line that runs `command` in the stage."""
        box = ["bwrap", "--unshare-pid", "--die-with-parent", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
        for name in sorted(name for name in _FROM_HOST if Path(name).exists()):
            box += ["--ro-bind", name, name]
        for inside, path in {**{f"/{top.name}": top for top in self.root.iterdir()}, **self.volumes}.items():
            box += ["--bind", str(path), inside]
        box.append("--clearenv")
        for name, value in ({"PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin", "HOME": "/tmp"} | self.env).items():
            box += ["--setenv", name, value]
        return [*box, "--chdir", self.workdir, *command]


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """Yields each instruction with its argument, continuation lines joined."""
    text = re.sub(r"\\\n", " ", dockerfile.read_text())
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


class Build:
    """Replays one Dockerfile."""

    def __init__(self, service: str, root: Path, wheels: Path | None, *, is_built: bool):
        self.service, self._root, self._wheels, self._is_built = service, root, wheels, is_built
        self._stages: dict[str, Stage] = {}

    def run(self) -> Stage:
        """Builds and returns the stage `cpu`."""
        stage: Stage | None = None
        for name, rest in instructions(_REPOSITORY / "deploy" / f"{self.service}.Dockerfile"):
            if name == "FROM":
                if "cpu" in self._stages:
                    break
                stage = self._begin(rest)
            else:
                assert stage is not None
                getattr(self, f"_{name.lower()}")(stage, rest)
        return self._stages["cpu"]

    def _begin(self, rest: str) -> Stage:
        base, _, name = rest.partition(" AS ")
        if base.partition("@")[0] != "python:3.11-slim-bookworm":
            raise SystemExit(f"{self.service}: this script replaces python:3.11-slim-bookworm only, not {base}")
        stage = self._stages[name] = Stage(self._root / self.service / name)
        if not self._is_built:
            shutil.rmtree(stage.root, ignore_errors=True)
            stage.root.mkdir(parents=True)
        return stage

    def _copy(self, stage: Stage, rest: str) -> None:
        if self._is_built:
            return
        words = shlex.split(rest)
        origin: Path | None = _REPOSITORY
        if words[0].startswith("--from="):
            origin = self._stages[words.pop(0).removeprefix("--from=")].root
        *sources, target = words
        for source in (origin / source.lstrip("/") for source in sources):
            into_directory = target.endswith("/") or len(sources) > 1
            destination = stage.path(target) / source.name if into_directory else stage.path(target)
            destination.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, destination, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(source, destination)

    def _run(self, stage: Stage, rest: str) -> None:
        if self._is_built or rest.startswith(("apt-get", "useradd")):
            return
        stage.path(".").mkdir(parents=True, exist_ok=True)
        for directory in ("/opt", "/wheel"):
            stage.path(directory).mkdir(parents=True, exist_ok=True)
        stage.volumes = {"/wheels": self._wheels} if self._wheels else {}
        find_links = ["env", "PIP_FIND_LINKS=/wheels"] if self._wheels else []
        subprocess.run(stage.sandboxed([*find_links, "sh", "-ec", rest]), check=True)

    def _workdir(self, stage: Stage, rest: str) -> None:
        stage.workdir = rest
        stage.path(".").mkdir(parents=True, exist_ok=True)

    def _env(self, stage: Stage, rest: str) -> None:
        for pair in shlex.split(rest):
            name, _, value = pair.partition("=")
            stage.env[name] = value.replace("$PATH", f"{sys.base_prefix}/bin:/usr/bin:/bin")

    def _entrypoint(self, stage: Stage, rest: str) -> None:
        stage.entrypoint = json.loads(rest)

    def _cmd(self, stage: Stage, rest: str) -> None:
        stage.command = json.loads(rest)

    def _user(self, stage: Stage, rest: str) -> None:
        pass

    _expose = _healthcheck = _user


def run_topology(stages: dict[str, Stage], root: Path, steps: int) -> None:
    """Runs the containers of compose.yaml as processes: certificates, then the three services, then the quickstart."""
    coordinator, deploy, work = stages["coordinator"], _REPOSITORY / "deploy", root / "work"
    certificates = root / "certificates"
    certificates.mkdir(exist_ok=True)
    coordinator.volumes = {"/certificates": certificates, "/scripts": deploy}
    subprocess.run(coordinator.sandboxed(["sh", "/scripts/make_certificates.sh", "/certificates"]), check=True)
    hosts = root / "hosts"
    names = {"localhost": "127.0.0.1", socket.gethostname(): "127.0.0.1", **_HOSTS}
    hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    for name in ("quickstart", "runs"):
        shutil.copytree(deploy / name, work / "deploy" / name, dirs_exist_ok=True)
    for service, stage in stages.items():
        stage.volumes = {"/certs": certificates / service, "/scripts": deploy, "/work": work, "/etc/hosts": hosts}
    coordinator.workdir = stages["trainer"].workdir = "/work"
    services: dict[int, str] = {}
    with ExitStack() as running:
        for service, host in _HOSTS.items():
            stage, log = stages[service], running.enter_context((root / f"{service}.log").open("w"))
            command = stage.sandboxed(word.replace("0.0.0.0", host) for word in (*stage.entrypoint, *stage.command))
            process = running.enter_context(_started(command, log))
            services[process.pid] = service
        addresses = [f"{service}:50051" for service in _HOSTS]
        quickstart = ["sh", "/scripts/quickstart.sh", *addresses, f"num_steps={steps}"]
        run = running.enter_context(_started(coordinator.sandboxed(quickstart)))
        pid, status = os.wait()
        if pid != run.pid or status:
            raise SystemExit(
                f"{services.get(pid, 'the run')} ended with {os.waitstatus_to_exitcode(status)}: {root}/*.log"
            )


@contextmanager
def _started(command: list[str], log: TextIO | None = None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(_END_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--built", action="store_true", help="skip the build and run what is in ROOT")
    options = parser.parse_args()
    root = options.root.resolve()
    builds = [Build(service, root, options.wheels, is_built=options.built) for service in _SERVICES]
    stages = {build.service: build.run() for build in builds}
    run_topology(stages, root, options.steps)


if __name__ == "__main__":
    main()
