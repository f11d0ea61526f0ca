"""Ranks of several nodes, each under a torchrun of its own: one serves, all work."""

import os
import socket
import sys
from pathlib import Path

import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb

from services.trainer.network import published_host, use_interface_to
from tests.support import free_port, running
from tests.trainer.deployment import Deployment


async def test_the_ranks_of_two_nodes_serve_as_one_trainer(trainer_files: Path):
    address, meeting = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"

    def node(rank: int) -> list[str]:
        torchrun = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-id", "nodes", "--rdzv-endpoint", meeting]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "services.trainer"]
        return [*command, "--listen", address]

    with running(node(0), trainer_files / "node-0.log") as first, running(node(1), trainer_files / "node-1.log"):
        deployment = Deployment(address, trainer_files / "models", first.pid)
        info = await deployment.client.call("GetInfo", pb.GetInfoRequest(), timeout_s=400, wait_for_ready=True)
        assert info.num_ranks == 2
        opened = await deployment.open()
        assert (opened.num_ranks, opened.store_host) == (2, "127.0.0.1")
        await deployment.publish()
        answer = await deployment.train(deployment.batch())
        assert answer.version == 1
        assert answer.metrics["grad_norm"] > 0
        await deployment.client.close()


@pytest.mark.parametrize(
    ("listen", "published"),
    [("0.0.0.0", ""), ("::", ""), ("[::]", ""), ("10.0.0.1", "10.0.0.1"), ("trainer-0", "trainer-0")],
)
def test_an_address_of_all_interfaces_is_not_published(listen: str, published: str):
    assert published_host(listen) == published


def test_gloo_takes_the_interface_that_reaches_the_first_node(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {})
    use_interface_to("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == socket.if_indextoname(1) == "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"  # the operator's word
    use_interface_to("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
