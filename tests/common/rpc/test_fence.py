"""Tests that only the coordinator that opened a service last is answered."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.rpc.fence import HEADER, Fence, incoming
from tests.support import raises


@contextmanager
def refused(token: str, message: str) -> Generator[None]:
    """Makes the calls inside the block with `token`, and asserts that one of them raises RUN_REPLACED."""
    with caller(token), raises(PreconditionFailed, reason=Reason.RUN_REPLACED) as caught:
        yield
    assert caught.value.message.startswith(message)


def caller(token: str):
    return incoming([(HEADER, token)] if token else [])


@pytest.fixture
def fence() -> Fence:
    """Provides the fence of a service on which run a was opened, and then run b."""
    fence = Fence()
    for token, run in (("first", "a"), ("second", "b")):
        with caller(token):
            fence.take_over(run)
            fence.require()
    return fence


def test_who_was_replaced_is_told_by_whom(fence: Fence):
    with refused("first", "run b was opened on this service and has replaced run a: give each run its own services"):
        fence.require()
    with caller("second"):
        fence.require()


def test_who_was_replaced_does_not_come_back(fence: Fence):
    with refused("first", "run b was opened"):
        fence.take_over("a")
    with caller("second"):
        fence.require()


def test_one_line_of_the_log_says_who_is_replaced(fence: Fence, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with caller("third"):
        fence.take_over("c")
        fence.take_over("c")
    line = "run c is opened; the coordinator that opened run b before is refused from now on"
    assert caplog.messages == [line]


def test_a_resumed_coordinator_takes_over_its_own_run(fence: Fence):
    with caller("third"):
        fence.take_over("b")
        fence.require()
    with refused("second", "another coordinator has opened run b on this service and goes on with it"):
        fence.require()


def test_opening_again_changes_nothing(fence: Fence):
    """A run opens its trainer once for each role, and opens a replica again that was lost for a moment."""
    with caller("second"):
        fence.take_over("b")
        fence.require()


@pytest.mark.parametrize("token", ["", "unknown"])
def test_a_call_without_the_token_is_refused(fence: Fence, token: str):
    with refused(token, "run b is open on this service, and the caller is not the coordinator that opened it"):
        fence.require()


def test_opening_needs_a_token():
    with caller(""), raises(InvalidInput, field=HEADER):
        Fence().take_over("a")


def test_before_a_run_is_opened_nobody_is_refused():
    with caller(""):
        Fence().require()


def test_an_error_of_a_call_that_was_replaced_meanwhile_says_so(fence: Fence):
    with refused("second", "run c was opened"), fence.guarding():
        with caller("third"):
            fence.take_over("c")
        raise ValueError("the engine was closed")
    with caller("third"), pytest.raises(ValueError, match="own"), fence.guarding():
        raise ValueError("its own")
