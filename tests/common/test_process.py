"""Tests that processes end with the one that started them, and that the coordinator needs no torch."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.process import call_loopback_directly
from services.common.rpc.command import ServeOptions
from tests.support import PATIENCE_S

WATCHED = "import sys; sys.stdin.read()"
# Says that it is up, then waits forever.
WATCHER = """
import signal, sys, threading
from services.common.process import exit_with
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
exit_with(int(sys.argv[1]))
sys.stdout.write("up\\n"), sys.stdout.flush()
while True:
    signal.pause()
"""


def test_service_ends_with_the_process_that_it_watches() -> None:
    watched = subprocess.Popen([sys.executable, "-c", WATCHED], stdin=subprocess.PIPE)
    watcher = subprocess.Popen(
        [sys.executable, "-c", WATCHER, str(watched.pid), "hears"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert watcher.stdout.readline() == "up\n"
        assert watcher.poll() is None
        watched.kill()
        # A zombie would do too: the pid ends before its parent asks for the exit code.
        assert watcher.wait(PATIENCE_S) == -signal.SIGTERM
    finally:
        watched.kill()
        watched.communicate()
        watcher.kill()
        watcher.communicate()


def test_service_ends_at_once_if_the_process_is_gone() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    watcher = subprocess.run([sys.executable, "-c", WATCHER, str(gone.pid), "hears"])
    assert watcher.returncode == 1


def test_service_that_does_not_hear_is_ended_after_its_grace() -> None:
    program = "import services.common.process as p; p._GRACE_S = 0.2\n" + WATCHER
    watched = subprocess.Popen([sys.executable, "-c", WATCHED], stdin=subprocess.PIPE)
    watcher = subprocess.Popen(
        [sys.executable, "-c", program, str(watched.pid), "deaf"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert watcher.stdout.readline() == "up\n"
        watched.kill()
        assert watcher.wait(PATIENCE_S) == 1
    finally:
        watched.kill()
        watched.communicate()
        watcher.kill()
        watcher.communicate()


def test_command_line_refuses_what_it_does_not_know() -> None:
    program = (
        "from services.common.rpc.command import serve_from_command_line as serve\n"
        "from services.common.errors import InvalidInput\n"
        "async def run(options):\n"
        "    if options.insecure: raise InvalidInput('port in use')\n"
        "    return 3 if options.listen == '127.0.0.1:7' else 4\n"
        "serve('reward', run)"
    )

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True)

    assert run("--listen", "127.0.0.1:7").returncode == 3
    assert run().returncode == 4
    refused = run("--insecure")
    assert (refused.returncode, "lockstep-reward: error: INVALID_INPUT: port in use" in refused.stderr) == (2, True)
    assert refused.stderr.endswith("port in use\n") and "Traceback" not in refused.stderr
    assert run("--lisen", "x").returncode == 2
    assert ServeOptions("a:1", False).listen == "a:1"


HEAVY = ("torch", "vllm", "transformers", "zmq", "opentelemetry", "wandb", "mlflow")


def test_command_line_starts_without_torch() -> None:
    program = "import sys, services.coordinator.cli.main; sys.stdout.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "services.coordinator.cli.main" in imported
    assert not imported & {*HEAVY, "numpy", "pyarrow", "pydantic", "huggingface_hub"}  # `--help` needs none of them


# tests/deploy/test_images.py shows it with all that an image lacks.
@pytest.mark.long
@pytest.mark.parametrize(
    "modules",
    [
        [
            "services.coordinator.cli.main",
            "services.coordinator.rl.session",
            "services.coordinator.sft",
            "services.coordinator.doctor.session",
            "services.coordinator.planning.suggest",
            "services.coordinator.replay.session",
            "services.coordinator.verify.session",
            "services.coordinator.daemon.runs",
        ],
        [
            "services.reward.servicer",
            "services.reward.probe",
            "services.reward.environments.executor",
            "services.reward.graders.math",
            "services.reward.graders.code",
            "services.reward.graders.texts",
        ],
    ],
    ids=["coordinator", "reward"],
)
def test_coordinator_and_reward_need_no_torch(modules: list[str]) -> None:
    """tests/compat/test_tensorboardx.py shows the same of what a run imports late."""
    program = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))\nimport {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("closed", ["1>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_open_to_nothing(closed: str, tmp_path: Path) -> None:
    program = (
        "import os, sys; from services.common.process import open_standard_streams; open_standard_streams(); "
        "print('x'); sys.stdin.close(); sys.stdout.flush(); print('y', file=sys.stderr); "
        f"os.open({str(tmp_path / 'next')!r}, os.O_CREAT) > 2 or sys.exit(7)"
    )
    assert subprocess.run(["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]).returncode == 0


@pytest.mark.parametrize(
    ("lower", "upper", "both"),
    [(".corp", "", ".corp,localhost,127.0.0.1,::1"), ("a", "b", "a,b,localhost,127.0.0.1,::1"), ("*", "", None)],
)
def test_no_proxy_is_asked_for_loopback(monkeypatch: pytest.MonkeyPatch, lower: str, upper: str, both: str | None):
    monkeypatch.setenv("no_proxy", lower)
    monkeypatch.setenv("NO_PROXY", upper)
    for _ in range(2):
        call_loopback_directly()
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == ((both, both) if both else (lower, upper))


def test_compiled_code_is_kept_where_doctor_looks_for_it() -> None:
    program = (
        "import os; from services.common.process import compiled_code, import_before_fork; import_before_fork(); "
        "names = ('VLLM_CACHE_ROOT', 'TRITON_CACHE_DIR', 'TORCHINDUCTOR_CACHE_DIR'); "
        "print(compiled_code(), *(os.environ[name] for name in names))"
    )
    environment = {"XDG_CACHE_HOME": "/caches", "TRITON_CACHE_DIR": "/own"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stdout.split() == ["/caches/lockstep", "/caches/lockstep/vllm", "/own", "/caches/lockstep/torch"]


def test_no_line_of_a_log_has_the_url_of_a_request():
    enabled = "[logging.getLogger(name).isEnabledFor(logging.INFO) for name in ('services', 'httpx2', 'mcp.client')]"
    program = f"import logging, services.common.process as p; p.configure_logging('reward'); print({enabled})"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[True, False, False]\n"
