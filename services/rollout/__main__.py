"""Runs one replica of the policy in vLLM: `lockstep-rollout --listen HOST:PORT`, or `python -m services.rollout`."""

import contextlib
import functools
import multiprocessing.util
import os
import tempfile

from services.common.process import import_before_fork, may_fork, socket_directory
from services.common.rpc.command import ServeOptions, serve_from_command_line
from services.common.rpc.server import Server


def _configure_vllm() -> None:
    """Sets environment variables that vLLM reads at import. On CPU: one unpinned thread, no compilation or extra
    process."""
    import torch

    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # Arrays travel inside of messages, and not as frames of their own: vLLM 0.26 overwrites the memory of a message
        # of several frames that ZeroMQ has not sent yet.
        "VLLM_MSGPACK_ZERO_COPY_THRESHOLD": str(1 << 40),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # unless _prepare can fork
    }
    if torch.cuda.is_available():
        settings["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    else:
        settings |= {
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",  # the search for n-grams would set OpenMP's number to this, for the whole process
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def preload() -> None:
    """Imports vLLM and what its engines need, before they are forked."""
    import_before_fork("torch")
    _configure_vllm()
    import torch

    is_gpu = torch.cuda.is_available()
    if not is_gpu:
        # A fork does not read OMP_NUM_THREADS again. With two OpenMP threads an engine would be slow and would sum in a
        # random order.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    import_before_fork("services.rollout.compat.client", "services.rollout.servicer")
    from services.rollout.compat.client import CPU_WORKER, GPU_WORKER, register_kernels

    # Every engine imports compressed_tensors to load its model, which takes a quarter of the time of its start on CPU.
    import_before_fork(GPU_WORKER if is_gpu else CPU_WORKER, "services.rollout.receiver", "compressed_tensors")
    if not is_gpu:
        register_kernels()


def _prepare(files: contextlib.ExitStack) -> None:
    """Imports vLLM. `files` removes the temporary files of this process and, on CPU, of the engines forked from it."""
    directory = files.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-"))
    os.environ["VLLM_RPC_BASE_PATH"] = sockets = files.enter_context(socket_directory())
    tempfile.tempdir = os.path.dirname(sockets)
    multiprocessing.util.get_temp_dir()  # not in `directory`: multiprocessing removes it itself, after that is gone
    tempfile.tempdir = directory  # vLLM leaves files behind
    preload()
    from services.rollout.compat.client import fork_engines

    if may_fork():
        fork_engines()


async def run(options: ServeOptions) -> int:
    from lockstep.rollout.v1 import rollout_pb2_grpc

    from services.rollout.servicer import NAME, RolloutServicer

    registry = options.metrics.registry
    server = Server(options.trace, options.tls, registry)
    servicer = RolloutServicer(server.fail, registry, counts=options.metrics.is_served)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server.grpc)
    options.metrics.serve()
    await server.start(options.listen, [NAME], insecure=options.insecure)
    code = await server.serve()
    await servicer.close()
    return code


def main() -> None:
    with contextlib.ExitStack() as files:
        serve_from_command_line("rollout", run, prepare=functools.partial(_prepare, files))


if __name__ == "__main__":
    main()
