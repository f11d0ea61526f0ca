"""Searches every state of the protocol, and shows that the search detects when one of its rules is missing."""

import logging
from collections.abc import Callable, Sequence

import pytest

from tests.model import properties
from tests.model.properties import INVARIANTS
from tests.model.protocol import FAULTS, PROTOCOL
from tests.model.search import PROGRESS, Found, search
from tests.model.state import Mode, Rules, World, world_of
from tests.trainer.harness_processes import marked

log = logging.getLogger(__name__)
NAMES = {holds: name for name, holds in INVARIANTS.items()}
Record = Callable[[str, object], None]

# MUTATIONS has, for each rule, the faults that are needed to notice that it is missing, and what is violated then;
# None stands for PROGRESS.
KILLS = ("the coordinator is killed", "the trainer is killed and started again")
LATE = "a call of a publication is lost or late"
FLIPPED = "bytes of a broadcast are flipped"
LOST_TRAIN = "a Train call or its answer is lost"
LOST_SAVE = "a SaveCheckpoint call or its answer is lost"
STOPPED = "a coordinator is replaced while it is stopped"
LOST_STEP = "a call to the environment or its answer is lost"
LOST_CLOSE = "a call that ends an episode is lost"
FLIPPED_BLOCK = "bytes of a block are flipped"
# Runs have two steps, except with a lag, which needs a batch that was drawn before the last update.
MODES = {
    "streamed blocks": world_of(Mode(streams=True)),
    "replicas that sleep": world_of(Mode(sleeps=True)),
    "lag": world_of(Mode(lag=1), num_steps=3),
    "episodes": world_of(Mode(turns=2)),
}
MUTATIONS: dict[str, tuple[Sequence[str], Callable[[World], bool] | None]] = {
    "second_phase": ([], properties.served_as_stamped),
    "epoch_fence": ([LATE], properties.not_disturbed),
    "fencing_token": ([STOPPED], properties.one_owner),
    "batch_id": ([KILLS[0]], None),
    "contents_compared": ([KILLS[1], STOPPED], properties.one_effect),
    "digests_compared": ([FLIPPED], properties.served_as_stamped),
    "digest_in_commit": ([LATE], properties.served_as_stamped),
    "stamp_of_draw": ([KILLS[1]], properties.on_policy),
    "stamp_compared": ([LOST_TRAIN], properties.on_policy),
    "synced_rows": ([], properties.recorded_first),
    "versioned_save": ([LOST_SAVE], properties.saved_as_finished),
    "leftovers_removed": ([STOPPED], properties.saved_as_finished),
}
MUTATIONS_OF_MODES: dict[tuple[str, str], tuple[Sequence[str], Callable[[World], bool] | None]] = {
    ("commit_awaited", "streamed blocks"): ([], properties.recorded_first),
    ("blocks_begin_anew", "streamed blocks"): ([KILLS[0]], properties.nothing_else_applied),
    ("blocks_compared", "streamed blocks"): ([FLIPPED_BLOCK], properties.one_effect),
    ("sleep_ends_serving", "replicas that sleep"): ([], properties.served_as_stamped),
    ("lag_drained", "lag"): ([], properties.drawn_from_one_version),
    ("leftovers_dropped", "episodes"): ([], properties.turns_of_one_stamp),
    ("steps_remembered", "episodes"): ([LOST_STEP], properties.acts_once),
    ("steps_numbered", "episodes"): ([LOST_STEP], properties.acts_once),
    ("episodes_leased", "episodes"): ([LOST_CLOSE], None),
    ("stamp_compared", "lag"): ([LOST_TRAIN], properties.on_policy),
    ("stamp_of_draw", "lag"): ([KILLS[1]], properties.on_policy),
}


@pytest.mark.parametrize("max_faults", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_protocol_keeps_its_promises_in_every_state(max_faults: int, record_property: Record):
    found = _reported(search(PROTOCOL, max_faults=max_faults), record_property)
    assert found.violated == "", "\n".join(found.path)
    assert found.num_finished > 1


@pytest.mark.long
def test_permuting_everything_finds_no_more(record_property: Record):
    """Tests that the shorter search of the first test leaves out only what makes no difference."""
    found = _reported(search(PROTOCOL, max_faults=1, permuting=True), record_property)
    assert found.violated == "", "\n".join(found.path)


@pytest.mark.parametrize("max_faults", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", MODES)
def test_so_does_a_run_of_another_mode(mode: str, max_faults: int, record_property: Record):
    found = _reported(search(PROTOCOL, max_faults=max_faults, first=MODES[mode]), record_property)
    assert found.violated == "", "\n".join(found.path)
    assert found.num_finished > 1


def test_there_is_a_mutation_for_each_rule():
    assert list(Rules._fields) == list(dict.fromkeys([*MUTATIONS, *(rule for rule, _ in MUTATIONS_OF_MODES)]))
    known = {step.name for step in FAULTS}
    used = [faults for faults, _ in (*MUTATIONS.values(), *MUTATIONS_OF_MODES.values())]
    assert all(name in known for faults in used for name in faults)


@pytest.mark.parametrize("rule", marked(MUTATIONS, long=["contents_compared"]))  # three times as long as any other
def test_a_protocol_without_a_rule_is_found(rule: str, record_property: Record):
    faults, invariant = MUTATIONS[rule]
    found = _reported(_without(rule, faults, World()), record_property)
    assert found.violated == (NAMES[invariant] if invariant else PROGRESS), "\n".join(found.path)
    assert found.path


@pytest.mark.parametrize(("rule", "mode"), MUTATIONS_OF_MODES)
def test_so_is_one_of_another_mode(rule: str, mode: str, record_property: Record):
    faults, invariant = MUTATIONS_OF_MODES[rule, mode]
    found = _reported(_without(rule, faults, MODES[mode]), record_property)
    assert found.violated == (NAMES[invariant] if invariant else PROGRESS), "\n".join(found.path)
    assert found.path


def _without(rule: str, faults: Sequence[str], first: World) -> Found:
    """Searches with these faults and without `rule`, after checking that a search with the rule finds nothing."""
    protocol = [step for step in PROTOCOL if not step.is_fault or step.name in faults]
    assert search(protocol, max_faults=len(faults), first=first).violated == ""
    return search(protocol, Rules()._replace(**{rule: False}), max_faults=len(faults), first=first)


def _reported(found: Found, record_property: Record) -> Found:
    log.info("%d states, %d of them finished, in %.1f s", *found[:3])
    record_property("states", found.num_states)
    record_property("seconds", round(found.seconds, 1))
    return found
