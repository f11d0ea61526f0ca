"""What a service does is seen by whoever follows it: from before it answers, over a restart, until it stops."""

import asyncio
import io
import socket
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from services.common.rpc.progress import PROGRESS
from services.common.rpc.server import Server
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.running import following_stages
from services.coordinator.observe.terminal import StageLines, Terminal
from services.coordinator.runs.reporter import Reporter, Reporters
from tests.support import free_port, until


class Noted(Reporter):
    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.ended: list[tuple[str, str]] = []
        self.seconds: dict[str, float] = {}

    def stage(self, service: str, name: str, began_s: float, seconds: float | None = None) -> None:
        (self.begun if seconds is None else self.ended).append((service, name))
        if seconds is not None:
            self.seconds[name] = seconds


async def _serve(address: str) -> tuple[Server, asyncio.Task[int]]:
    server = Server()
    await server.start(address, [])
    return server, asyncio.create_task(server.serve(grace_s=60.0))


async def test_stages_are_followed_from_before_a_service_answers_and_after_its_restart() -> None:
    address, noted = f"127.0.0.1:{free_port()}", Noted()
    async with following_stages(Addresses(trainer=address), Reporters([noted])):
        await until(lambda: noted.begun == [("trainer", "start")])
        with PROGRESS.stage("read the weights"):  # it began before anybody could watch
            server, serving = await _serve(address)
            await until(lambda: ("trainer", "read the weights") in noted.begun)
            assert noted.ended == [("trainer", "start")]
        await until(lambda: ("trainer", "read the weights") in noted.ended)
        assert 0 < noted.seconds["read the weights"] < 60
        begin = time.monotonic()
        server.stop()
        await serving
        assert time.monotonic() - begin < 30, "a watcher's call must not keep a service from stopping"
        await until(lambda: noted.begun.count(("trainer", "start")) == 2)
        server, serving = await _serve(address)
        await until(lambda: noted.ended.count(("trainer", "start")) == 2)
        with PROGRESS.stage("export the model"):
            await until(lambda: ("trainer", "export the model") in noted.begun)
        await until(lambda: ("trainer", "export the model") in noted.ended)
    server.stop()
    await serving


async def test_a_replica_has_the_name_of_its_log_also_if_it_is_the_only_one() -> None:
    noted, address = Noted(), f"127.0.0.1:{free_port()}"
    async with following_stages(Addresses(reward=(address,), rollout=(address,)), Reporters([noted])):
        await until(lambda: len(noted.begun) == 2)
    assert {service for service, _ in noted.begun} == {"reward", "rollout-0"}


async def test_a_stage_of_another_thread_is_seen_and_a_lost_service_has_no_stage_left() -> None:
    noted, goes_on = Noted(), threading.Event()

    def work() -> None:
        with PROGRESS.stage("load the policy model"):
            goes_on.wait()

    address = f"127.0.0.1:{free_port()}"
    server, serving = await _serve(address)
    async with following_stages(Addresses(rollout=(address, f"127.0.0.1:{free_port()}")), Reporters([noted])):
        working = asyncio.create_task(asyncio.to_thread(work))
        await until(lambda: ("rollout-0", "load the policy model") in noted.begun)
        await server.grpc.stop(0)
        await until(lambda: ("rollout-0", "load the policy model") in noted.ended)
    goes_on.set()
    await working
    server.stop()
    await serving
    assert ("rollout-1", "start") in noted.begun
    assert sorted(noted.begun) == sorted(noted.ended), "what was shown as running must end"


async def test_an_engine_process_tells_its_stages_through_a_socket(tmp_path: Path, monkeypatch: Any) -> None:
    from services.rollout import engine

    shown: list[str] = []
    monkeypatch.setattr(PROGRESS, "begin", lambda span: shown.append(span.name))
    monkeypatch.setattr(PROGRESS, "end", lambda span: shown.append(f"{span.name} ended"))
    with engine._following_stages(tmp_path / "stages"), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"set up caches", str(tmp_path / "stages"))
        await until(lambda: "set up caches" in shown)
    assert shown == ["load the model", "load the model ended", "set up caches", "set up caches ended"]


def test_lines_are_printed_for_long_stages_and_leave_a_terminal_to_the_table() -> None:
    plain, live = Console(file=io.StringIO(), width=80), Console(file=io.StringIO(), width=80, force_terminal=True)
    for console in (plain, live):
        lines = StageLines(console)
        lines.stage("trainer", "start", time.monotonic())
        lines.stage("trainer", "start", time.monotonic(), 12.34)
        lines.stage("trainer", "import FSDP", time.monotonic(), 0.2)
        lines.begin_phase("evaluating", 0)
        table = Terminal(console, num_steps=2)
        table.begin_phase("training", 0)
        table.stage("trainer", "save a checkpoint", time.monotonic() - 5)
        lines.stage("trainer", "save a checkpoint", time.monotonic() - 5)
        table.close()
        lines.close()
    assert plain.file.getvalue().startswith("  trainer: start, 12.3 s\n")  # type: ignore[attr-defined]
    assert "import FSDP" not in plain.file.getvalue()  # type: ignore[attr-defined]
    shown = live.file.getvalue()  # type: ignore[attr-defined]
    assert "trainer: start, 12.3 s" in shown
    assert "trainer: save a checkpoint, 5 s" in shown
