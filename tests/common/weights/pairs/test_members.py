"""Tests that the trainer rank and the engine worker on the same device become partners, and how they are connected."""

import os
from contextlib import ExitStack

import pytest
from lockstep.types.v1 import pairs_pb2 as pb

from services.common.errors import InvalidInput
from services.common.process import allow_descriptors
from services.common.weights.pair_link import Link, Listener, device_name, partners
from tests.common.weights.group_harness import CPU


def test_partners_are_on_one_device() -> None:
    member = lambda name: pb.PairMember(device=name)  # noqa: E731
    a, b, c = map(member, "abc")
    assert partners([a, b, b, a], 2) == {2: 1, 3: 0}
    assert partners([a, b, b], 2) == {2: 1}
    for wrong, why in (([a, b, a, c], "on device c"), ([a, a, a], "2 trainer ranks"), ([a, b, b, b], "2 engine work")):
        with pytest.raises(InvalidInput, match=why):
            partners(wrong, 2)
    assert device_name(CPU, 3) != device_name(CPU, 2)


def test_a_process_with_many_descriptors_has_connections_too() -> None:
    allow_descriptors()
    with ExitStack() as stack:
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        listener = Listener()
        stack.callback(listener.close)
        assert not listener.has_connection()
        caller = Link.to(listener.name)
        stack.callback(caller.close)
        assert listener.has_connection()
        link = listener.accept()
        assert link and not link.has_message()
        stack.callback(link.close)
        caller.send(pb.PairMessage())
        assert link.has_message(60.0)
