"""Tests that a connection lost while a run is opened ends no run: OpenRun is sent again, and opens the run once."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import Reason, Unavailable
from services.common.rpc.client import Client
from services.trainer.ranks.calls import Message, rank_command
from tests.coordinator.runs.killing import CountingRank, make_run, surviving_services


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_lost_call_to_open_a_run_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    attempt, open_once = Client._attempt, CountingRank.open
    lost, opened = [], []

    @asynccontextmanager
    async def losing(self: Client, name: str, request: Any) -> AsyncGenerator[Any]:
        is_lost = name == "OpenRun" and self not in lost
        if is_lost:
            lost.append(self)
        if is_lost and not arrives:
            raise Unavailable("the link is down", reason=Reason.UNREACHABLE)
        async with attempt(self, name, request) as attempted:
            yield attempted
        if is_lost:
            raise Unavailable("the link is down", reason=Reason.UNREACHABLE)

    @rank_command
    def counted(self: CountingRank, **request: Any) -> Message:
        opened.append(request["role"])
        return open_once(self, **request)

    monkeypatch.setattr(Client, "_attempt", losing)
    monkeypatch.setattr(CountingRank, "open", counted)
    async with surviving_services() as services:
        assert (await services.run(make_run(tmp_path, 1))).version == 1
    assert (len(lost), len(opened)) == (3, 1)  # trainer, replica and reward service
