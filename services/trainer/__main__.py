"""`lockstep-trainer --listen HOST:PORT`, or `torchrun -m services.trainer`: rank 0 serves, every rank works."""

import argparse
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from importlib import import_module

import torch
import torch.distributed as dist

from services.common.rpc import Server, parse_address
from services.common.serve import ServeOptions, serve_from_command_line
from services.common.weights.store import ServedStore
from services.trainer.metrics import TrainerMetrics
from services.trainer.network import use_interface_to
from services.trainer.ranks import Ranks, follow
from services.trainer.worker import Worker


def _join_torchrun() -> tuple[dist.Store, int, int]:
    if os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
        use_interface_to(os.environ["MASTER_ADDR"])
    return next(dist.rendezvous("env://"))


def _device() -> torch.device:
    # torchrun leaves one thread to each; an optimizer on CPU wants its share of the cores also where there are GPUs.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


async def _run(options: ServeOptions) -> int:
    store, rank, world_size = _join_torchrun()
    worker = Worker(store, rank, world_size, _device())
    if rank > 0:
        follow(rank, store.get("lockstep/ranks").decode(), worker)
    return await _serve(options, worker, store, world_size)


async def _serve(options: ServeOptions, worker: Worker, store: dist.Store, world_size: int) -> int:
    from lockstep.trainer.v1 import trainer_pb2_grpc

    from services.trainer.servicer import NAME, TrainerServicer

    import_module("services.trainer.fsdp.backend")  # slow to import: before anyone waits for it
    server = Server(options.trace, options.tls, options.metrics.registry)
    metrics = TrainerMetrics(options.metrics.registry)
    ranks = Ranks(world_size, socket.gethostbyname(os.environ["MASTER_ADDR"]), server.fail, metrics.phase)
    store.set("lockstep/ranks", ranks.address)
    threading.Thread(target=_follow_on_device, args=(ranks.address, worker), name="rank-0", daemon=True).start()
    await ranks.wait_for_all()
    host, _ = parse_address(options.listen, field="listen")
    servicer = TrainerServicer(ranks, worker, ServedStore(host), metrics)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server.grpc)
    options.metrics.serve()
    await server.start(options.listen, [NAME], insecure=options.insecure)
    code = await server.serve()
    options.trace.close()
    logging.shutdown()
    # A rank may be inside a collective that nobody will answer; torchrun ends the others when this process ends.
    os._exit(code)


def _follow_on_device(address: str, worker: Worker) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    follow(0, address, worker)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point. Outside of torchrun it first becomes torchrun for the ranks of this host."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--nproc-per-node", default="1", help="ranks of a trainer on this host alone, without torchrun")
    count, rest = own.parse_known_args(args)
    if "RANK" not in os.environ and not {"-h", "--help"} & set(rest):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count.nproc_per_node]
        os.execv(sys.executable, [sys.executable, *torchrun, "-m", "services.trainer", *rest])
    serve_from_command_line("trainer", _run, args, parents=[own])


if __name__ == "__main__":
    main()
