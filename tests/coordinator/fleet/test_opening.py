"""Tests opening a run: a lost connection does not end it, and services that do not fit the config are refused."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.errors import InvalidInput, Reason, Unavailable
from services.common.rpc.client import Client
from services.coordinator.fleet.opening import _require_pairs
from services.trainer.ranks.calls import Message, rank_command
from tests.coordinator.runs.killing import CountingRank, make_run, surviving_services
from tests.support import raises


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


async def test_a_trainer_with_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """Its results would differ in their last bits from those that the config stands for, and a replay would not fit."""
    async with surviving_services() as services:
        with raises(InvalidInput, field="trainer.num_ranks") as caught:
            await services.run(make_run(tmp_path, 1, trainer={"num_ranks": 2}))
    assert services.given.trainer in caught.value.message


def test_replicas_that_make_no_pairs_with_the_ranks_are_refused() -> None:
    replicas = [SimpleNamespace(address=f"host:{port}", num_workers=1) for port in (7001, 7002)]
    _require_pairs(2, SimpleNamespace(replicas=replicas))  # type: ignore[arg-type]
    with raises(InvalidInput, field="placement"):
        _require_pairs(1, SimpleNamespace(replicas=replicas))  # type: ignore[arg-type]
