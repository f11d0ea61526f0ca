"""Models what can go wrong. The search limits the number of faults on a path."""

from collections.abc import Iterator

from tests.model.coordinator import attempt_failed, drawing, ended, moved, must_draw, synced
from tests.model.services import broadcast
from tests.model.state import CORRUPT, Batch, Replica, Request, Rules, Trainer, Weights, World, is_pending, with_replica


def is_running(w: World, rules: Rules) -> bool:
    return w.coordinator.at not in ("down", "done")


def kill_coordinator(w: World, rules: Rules) -> Iterator[World]:
    """Kills the coordinator. Its calls that are under way may still arrive."""
    yield ended(w)


def can_thaw_late(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "collecting" or must_draw(w, rules)


def thaw_late(w: World, rules: Rules) -> Iterator[World]:
    """Stops a coordinator, and lets it go on after another one has taken over the run.

    It then sends a batch that is only in its own memory.
    """
    c = w.coordinator
    batch = Batch(c.version, drawn=c.stamp, stamp=c.stamp, is_foreign=True)
    trainer = w.trainer._replace(inbox=(*w.trainer.inbox, Request("train", c.token, batch)))
    yield ended(w._replace(trainer=trainer))


def trainer_is_open(w: World, rules: Rules) -> bool:
    return w.trainer.is_open


def kill_trainer(w: World, rules: Rules) -> Iterator[World]:
    t = w.trainer
    yield w._replace(trainer=Trainer(waits=t.waits, answer=t.answer, saved=t.saved))


def replica_is_open(w: World, rules: Rules, index: int) -> bool:
    return w.replicas[index].is_open


def kill_replica(w: World, rules: Rules, index: int) -> Iterator[World]:
    r = w.replicas[index]
    dead = Replica(seat=r.seat, view=r.view, waits=r.waits, answer=r.answer)
    yield with_replica(w, index, dead)


def is_publishing(w: World, rules: Rules) -> bool:
    return w.coordinator.at in ("joining", "sending", "committing") and not attempt_failed(w, rules)


def lose_draw(w: World, rules: Rules) -> Iterator[World]:
    index, r = drawing(w)
    yield moved(with_replica(w, index, r._replace(view="dead", waits=None, answer=None)), "generating")


def can_repeat_batch(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "training" and (is_pending(w.trainer) or w.trainer.answer is not None)


def repeat_batch(w: World, rules: Rules) -> Iterator[World]:
    """Loses the connection, so that the coordinator sends the batch again; the first call may still arrive."""
    t = w.trainer
    yield w._replace(trainer=t._replace(inbox=(*t.inbox, t.waits), answer=None))


def can_repeat_save(w: World, rules: Rules) -> bool:
    return w.coordinator.saving > 0 and w.trainer.is_open


def repeat_save(w: World, rules: Rules) -> Iterator[World]:
    """Loses the call to save, before or after its effect, so that it is repeated."""
    t, c = w.trainer, w.coordinator
    request = Request("save", c.token, c.saving)
    yield w._replace(trainer=t._replace(inbox=(*(one for one in t.inbox if one != request), request), saved=None))


def flip(w: World, rules: Rules) -> Iterator[World]:
    """Broadcasts the weights, of which one replica receives other bytes than were sent."""
    for sound in broadcast(w, rules):
        for index, r in enumerate(sound.replicas):
            if r.received:
                wrong = Weights(r.received.version, CORRUPT)
                stamp = None if rules.second_phase else wrong
                answer = r.answer and r.answer._replace(value=wrong)
                yield with_replica(sound, index, r._replace(content=wrong, received=wrong, answer=answer, stamp=stamp))


def catch_up(w: World, rules: Rules) -> Iterator[World]:
    yield w._replace(ledger=synced(w.ledger, w.ledger.unsynced))


def has_unsynced(w: World, rules: Rules) -> bool:
    return w.ledger.unsynced is not None
