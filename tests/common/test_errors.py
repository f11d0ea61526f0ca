"""Tests that docs/operations.md explains every reason of a failure, and how messages are worded."""

import re

import grpc

from services.common.errors import DataLoss, Reason, counted, from_rpc_error
from tests.support import ROOT

PAGE = ROOT / "docs" / "operations.md"


def test_every_reason_is_in_the_page_once_and_no_other() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(reason for reason, _, _ in rows) == sorted(Reason)
    assert all(len(happened) > 15 and len(fix) > 10 for _, happened, fix in rows)


def test_what_grpc_cannot_read_did_not_arrive_as_it_was_sent() -> None:
    metadata = grpc.aio.Metadata()
    broken = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, details="Illegal header key: baggag%")
    failure = from_rpc_error(broken, target="Train at 127.0.0.1:7001")
    assert isinstance(failure, DataLoss)
    assert failure.reason is Reason.CORRUPT_TRANSFER


def test_one_is_singular() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
