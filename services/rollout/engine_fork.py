"""On CPU: engines forked from a process that has imported vLLM, which costs an engine of its own 10 s of CPU."""

import os
import socket
from multiprocessing import forkserver, util

import vllm.envs

import services.rollout.servicer  # noqa: F401  what the service itself needs, and most of what an engine needs

_OF_ENGINES_ONLY = ["vllm.v1.worker.cpu_worker", "services.rollout.weights.receiver"]


def fork_engines() -> None:
    """Has vLLM take its processes from multiprocessing's fork server, which is a fork of this process as it is now.

    By itself the library would start a new interpreter as server, which would import everything once more. This
    process must not use gRPC yet: a fork has none of its threads.
    """
    address = os.path.join(util.get_temp_dir(), "engines")  # in a directory that only this user can enter
    server_alive, alive = os.pipe()  # held open by this process and all engines; with the last of them the server ends
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(alive)
            _serve(listener.fileno(), server_alive)
    os.close(server_alive)
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive, pid
    # vLLM has no name for this, and on CPU it sets the variable to spawn.
    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "forkserver"


def _serve(listener: int, alive: int) -> None:
    try:
        forkserver.main(listener, alive, _OF_ENGINES_ONLY)
    finally:
        os._exit(0)
