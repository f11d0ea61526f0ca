"""Runs one rank of a trainer, given torchrun's variables. Rank 0 also serves gRPC."""

import logging
import os
import signal
import socket
import threading

import torch
import torch.distributed as dist
from lockstep.trainer.v1 import trainer_pb2_grpc

import services.trainer.fsdp.backend  # noqa: F401  slow to import, so it is imported before a call waits for it
from services.common.rpc.address import parse_address
from services.common.rpc.command import ServeOptions
from services.common.rpc.server import Server
from services.common.weights.store import ServedStore
from services.trainer.metrics import TrainerMetrics
from services.trainer.ranks.calls import Ranks, RanksAddress, follow, use_interface_to
from services.trainer.ranks.worker import Worker
from services.trainer.servicer import NAME, TrainerServicer


def _device(threads_per_rank: int | None) -> torch.device:
    # torchrun sets one thread per rank, but an optimizer on CPU needs its share of the cores, even on a host with GPUs.
    num_cores, num_ranks = len(os.sched_getaffinity(0)), int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(threads_per_rank or max(1, num_cores // num_ranks))
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


async def run(options: ServeOptions, threads_per_rank: int | None) -> int:
    """Runs commands on every rank, and serves gRPC on rank 0, until the trainer is told to end or a rank fails.

    If `threads_per_rank` is None, this host's cores are divided equally among its ranks.
    """
    if os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
        use_interface_to(os.environ["MASTER_ADDR"])
    store, rank, world_size = next(dist.rendezvous("env://"))
    worker = Worker(store, rank, world_size, _device(threads_per_rank))
    if rank > 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            # torchrun signals all ranks. Only rank 0 reacts; it may need the others to shut down, so they end after it.
            signal.signal(number, signal.SIG_IGN)
        code = 0 if follow(rank, RanksAddress.unpack(store.get("lockstep/ranks")), worker) else 1
    else:
        code = await _serve(options, worker, store, world_size)
    logging.shutdown()  # os._exit flushes nothing
    # os._exit, because a thread may be stuck in a collective that no rank will answer. When this process exits, its
    # launcher ends the other ranks.
    os._exit(code)


async def _serve(options: ServeOptions, worker: Worker, store: dist.Store, world_size: int) -> int:
    server = Server(options.trace, options.tls, options.metrics.registry)
    metrics = TrainerMetrics(options.metrics.registry)
    # An address, because ZeroMQ listens on addresses and not on names of hosts.
    ranks = Ranks(world_size, socket.gethostbyname(os.environ["MASTER_ADDR"]), server.fail, metrics.phase)
    store.set("lockstep/ranks", ranks.address.pack())
    threading.Thread(target=_follow_on_device, args=(ranks.address, worker), name="rank-0", daemon=True).start()
    await ranks.wait_for_all()
    host, _ = parse_address(options.listen, field="listen")
    servicer = TrainerServicer(ranks, worker, ServedStore(host), metrics)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server.grpc)
    options.metrics.serve()
    await server.start(options.listen, [NAME], insecure=options.insecure)
    code = await server.serve()
    options.trace.close()
    if code == 0:
        await ranks.end()
    return code


def _follow_on_device(address: RanksAddress, worker: Worker) -> None:
    if torch.cuda.is_available():
        # CUDA's current device is one of the thread.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    follow(0, address, worker)
