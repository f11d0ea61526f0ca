"""A connection that is lost while a run is opened costs no run: OpenRun is sent again, and opens the run once."""

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
    call_once, open_once = Client._call_once, CountingRank.open
    lost, opened = [], []

    async def losing(self: Client, name: str, request: Any, timeout_s: float, **options: Any) -> Any:
        is_lost = name == "OpenRun" and self not in lost
        answer = None if is_lost and not arrives else await call_once(self, name, request, timeout_s, **options)
        if is_lost:
            lost.append(self)
            raise Unavailable("the link is down", reason=Reason.UNREACHABLE)
        return answer

    @rank_command
    def counted(self: CountingRank, **request: Any) -> Message:
        opened.append(request["role"])
        return open_once(self, **request)

    monkeypatch.setattr(Client, "_call_once", losing)
    monkeypatch.setattr(CountingRank, "open", counted)
    async with surviving_services() as services:
        assert (await services.run(make_run(tmp_path, 1))).version == 1
    assert (len(lost), len(opened)) == (3, 1)  # trainer, replica and reward service
