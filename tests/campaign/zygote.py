"""`python -m tests.campaign.zygote`: imports everything once, and forks the processes that the campaign asks for.

Lines of JSON on stdin ask for a process: {"kind", "args", "log", "gate", "cwd", "is_real"}. The answer on stdout is
{"pid"}, and {"exited", "code"} when it has ended. It ends, with all that it started, when stdin is closed.
"""

import ctypes
import functools
import json
import os
import selectors
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from services.common.process import import_before_fork
from tests.campaign import toy_rollout

_MODULES = (
    "tests.campaign.gate",
    "tests.campaign.toy_trainer",
    "services.reward.servicer",
    "services.reward.environments.servicer",
    "services.coordinator.cli.main",
    "services.coordinator.rl.session",
    "services.coordinator.planning.plan",
    "tensorboardX.event_file_writer",
    "transformers",
)
_PR_SET_PDEATHSIG = 1


def _run(kind: str, args: list[str], gate: Path | None) -> None:
    from services.common.rpc.command import serve_from_command_line
    from services.coordinator.cli.main import main as main_of_command
    from services.reward.__main__ import run as run_reward
    from tests.campaign import gate as gates
    from tests.campaign import toy_trainer

    if kind == "coordinator":
        if gate:
            gates.guard_rows(gate)
        sys.argv = ["lockstep", "run", *args]
        main_of_command()
        return
    if gate:
        gates.guard_calls(gate, kind)
    if kind == "trainer":
        serve = functools.partial(toy_trainer.serve, writing=toy_trainer.fork_second_rank())
    else:
        serve = run_reward if kind == "reward" else toy_rollout.serve
    serve_from_command_line(kind.partition("-")[0], serve, args)


def _become(asked: dict[str, Any]) -> None:
    """Runs what is asked for in this new process."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        os.closerange(3, 256)
        os.chdir(asked["cwd"])
        sys.path.insert(0, asked["cwd"])
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))  # noqa: SIM115
        if asked["is_real"]:
            os.execv(
                sys.executable,
                [sys.executable, "-m", "tests.campaign.real", asked["kind"], asked["gate"], *asked["args"]],
            )
        _run(asked["kind"], asked["args"], Path(asked["gate"]) if asked["gate"] else None)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(error.code)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 a fork must never return to the zygote's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Serves until stdin is closed."""
    toy_rollout.replace_engine()
    import_before_fork(*_MODULES, "services.rollout.servicer")
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    buffer = b""
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                sys.stdout.write(json.dumps({"exited": key.data, "code": os.waitstatus_to_exitcode(status)}) + "\n")
                sys.stdout.flush()
                continue
            received = os.read(0, 1 << 16)
            if not received:
                return
            buffer += received
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    _become(json.loads(line))
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                sys.stdout.write(json.dumps({"pid": pid}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
