"""Forks engines from a process that has imported vLLM. An engine's own import would take 10 to 25 s."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, util

import vllm.envs

# Modules of the workers of an engine.
CPU_WORKER = "vllm.v1.worker.cpu_worker"
GPU_WORKER = "vllm.v1.worker.gpu_worker"
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def fork_engines() -> None:
    """Makes vLLM start its processes from multiprocessing's fork server, which becomes a fork of this process.

    This process must not have used gRPC yet, because a fork does not inherit gRPC's threads, and must not have
    initialized CUDA.

    Reason: multiprocessing would start a new interpreter as its server, which would import everything again, so the
    server is replaced. vLLM has no setting for the fork server; on CPU it sets the start method to spawn. Seen with
    Python 3.11 and vLLM 0.32.0.
    """
    address = os.path.join(util.get_temp_dir(), "engines")  # in a directory that only this user can enter
    server_alive, alive = os.pipe()  # open in this process and all engines; the server ends when all of them have ended
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(alive)
            _serve(listener.fileno(), server_alive)
    os.close(server_alive)
    taken_over = {"_forkserver_address": address, "_forkserver_alive_fd": alive, "_forkserver_pid": pid}
    vars(forkserver._forkserver).update(taken_over)
    vllm.envs.environment_variables[_METHOD] = lambda: "forkserver"


def forks_engines() -> bool:
    """Returns whether vLLM starts its processes as forks of one that has imported it."""
    return vllm.envs.VLLM_WORKER_MULTIPROC_METHOD == "forkserver"


@contextmanager
def spawning_engines() -> Iterator[None]:
    """Makes vLLM start its processes from new interpreters inside the `with` block.

    Reason: a fork server does not see environment variables that are set later. By such variables vLLM may tell each
    data-parallel process its GPUs, and any engine its model runner. Seen on GPU with vLLM 0.26.0.
    """
    before = vllm.envs.environment_variables[_METHOD]
    vllm.envs.environment_variables[_METHOD] = lambda: "spawn"
    try:
        yield
    finally:
        vllm.envs.environment_variables[_METHOD] = before


def _serve(listener: int, alive: int) -> None:
    # An engine forks its workers itself: multiprocessing would start another server for them.
    vllm.envs.environment_variables[_METHOD] = lambda: "fork"
    try:
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)
