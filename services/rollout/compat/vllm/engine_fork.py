"""On CPU: engines forked from a process that has imported vLLM, which costs an engine of its own 10 s of CPU."""

import os
import socket
from collections.abc import Sequence
from multiprocessing import forkserver, util

import vllm.envs

_CPU_WORKER = "vllm.v1.worker.cpu_worker"


def fork_engines(preload: Sequence[str]) -> None:
    """Has vLLM take its processes from multiprocessing's fork server, which is a fork of this process as it is now.

    The server imports vLLM's CPU worker and the modules `preload`, which only engines need. This process must not use
    gRPC yet: a fork has none of its threads.

    Reason: by itself multiprocessing would start a new interpreter as server, which would import everything once more,
    so its server is replaced; and vLLM has no setting for the fork server, on CPU it sets the variable to spawn. Seen
    with Python 3.11 and vLLM 0.32.0.
    """
    address = os.path.join(util.get_temp_dir(), "engines")  # in a directory that only this user can enter
    server_alive, alive = os.pipe()  # held open by this process and all engines; with the last of them the server ends
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(alive)
            _serve(listener.fileno(), server_alive, [_CPU_WORKER, *preload])
    os.close(server_alive)
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive, pid
    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "forkserver"


def _serve(listener: int, alive: int, preload: list[str]) -> None:
    try:
        forkserver.main(listener, alive, preload)
    finally:
        os._exit(0)
