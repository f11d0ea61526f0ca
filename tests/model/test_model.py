"""Searches every state of the protocol, and shows that the search finds a protocol that lacks one of its rules."""

import logging
from collections.abc import Callable

from tests.model.protocol import PROTOCOL
from tests.model.search import Found, search

log = logging.getLogger(__name__)
MAX_FAULTS = 2
Record = Callable[[str, object], None]


def test_the_protocol_keeps_its_promises_in_every_state(record_property: Record):
    found = _reported(search(PROTOCOL, max_faults=MAX_FAULTS), record_property)
    assert found.violated == "", "\n".join(found.path)
    assert found.num_finished > 1


def _reported(found: Found, record_property: Record) -> Found:
    log.info("%d states, %d of them finished, in %.1f s", *found[:3])
    record_property("states", found.num_states)
    record_property("seconds", round(found.seconds, 1))
    return found
