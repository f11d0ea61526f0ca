"""Tests ranks of several nodes, each under its own torchrun: one serves, and all work."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService

from services.trainer.ranks.calls import published_host, use_interface_to
from tests.support import PATIENCE_S, descendants, free_port, running, still_there
from tests.trainer.deployment import Deployment
from tests.trainer.toy_nodes import toy


def ranks_of(node: subprocess.Popen[bytes]) -> list[int]:
    return [pid for pid, command in descendants(node.pid).items() if "-m services.trainer" in command]


async def test_the_ranks_of_two_nodes_serve_as_one_trainer_and_end_with_it(trainer_files: Path):
    address, meeting = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    logs = [trainer_files / "node-0.log", trainer_files / "node-1.log"]

    def node(rank: int) -> list[str]:
        torchrun = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-id", "nodes", "--rdzv-endpoint", meeting]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "services.trainer"]
        return [*command, "--listen", address]

    with running(node(0), logs[0]) as first, running(node(1), logs[1]) as second:
        deployment = Deployment(address, trainer_files / "models", first.pid)
        info = await deployment.client.call(
            TrainerService.GetInfo, pb.GetInfoRequest(), timeout_s=1200, wait_for_ready=True
        )
        assert info.num_ranks == 2
        opened = await deployment.open()
        assert (opened.num_ranks, opened.store_host) == (2, "127.0.0.1")
        await deployment.publish()
        answer = await deployment.train(deployment.batch())
        assert answer.version == 1
        assert answer.metrics["grad_norm"] > 0
        await deployment.client.close()
        # A scheduler ends a job like this, all of it at once, and no rank takes that for a failure of another.
        ranks = [*ranks_of(first), *ranks_of(second)]
        assert len(ranks) == 2
        first.terminate()
        second.terminate()
        assert not still_there(ranks)
    lines = [line for log in logs for line in log.read_text().splitlines() if " trainer " in line]
    expected = ("listens on", "attention is computed by", "rpc.progress: ")
    assert [line for line in lines if not any(words in line for words in expected)] == []


@pytest.mark.long  # test_lost_ranks.py loses a rank 0 that needs no torch
def test_no_node_outlives_the_one_that_serves(tmp_path: Path):
    """Tests a rank as torchrun starts it, with a rank 0 that vanishes."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": 1, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meeting.port}
    command = ["env", *(f"{name}={value}" for name, value in variables.items())]
    with toy("serve") as rank_0:
        meeting.set("lockstep/ranks", rank_0.stdout.readline().strip())
        with running([*command, sys.executable, "-m", "services.trainer"], tmp_path / "log") as rank_1:
            assert rank_0.stdout.readline() == "there\n"
            rank_1.terminate()  # as its torchrun does when it is asked to end; rank 0 decides
            rank_0.kill()
            assert rank_1.wait(PATIENCE_S) == 1
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if " trainer " in line]
    assert "rank 1 ends: rank 0 at tcp://127.0.0.1:" in line


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
    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"  # set by the operator
    use_interface_to("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
