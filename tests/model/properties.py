"""Defines what must hold in every state, and when a run has reached its end."""

from collections.abc import Callable, Mapping

from tests.model.state import Update, World


def on_policy(w: World) -> bool:
    """Returns whether each version t was updated by the batch of version t, drawn from what its stamp says.

    The stamp is that of version t or, with a lag k, of a version from t - k on.
    """
    return all(_is_of(w, update) for update in w.updates)


def _is_of(w: World, update: Update) -> bool:
    batch, version = update.batch, update.before.version
    if batch.version != version or batch.drawn != batch.stamp:
        return False
    return batch.stamp.version >= version - w.mode.lag if w.mode.lag else batch.stamp == update.before


def drawn_from_one_version(w: World) -> bool:
    """Returns whether every batch is drawn from exactly one version, so that the run can be repeated.

    With a lag k, batch t is drawn from version t - k, or from version 0 if that is negative.
    """
    batches = [batch for batch in w.ledger.collected if batch]
    return all(batch.stamp.version == max(0, batch.version - w.mode.lag) for batch in batches)


def nothing_else_applied(w: World) -> bool:
    return all(update.is_pure for update in w.updates)


def silent_asleep(w: World) -> bool:
    """Returns whether no replica serves anything while it sleeps."""
    return not any(r.is_asleep and r.stamp for r in w.replicas)


def served_as_stamped(w: World) -> bool:
    """Returns whether what each replica serves was compared on all members and is what its engine really has."""
    return all(r.stamp is None or (r.stamp == r.content and r.stamp in w.compared) for r in w.replicas)


def never_backwards(w: World) -> bool:
    return all(r.stamp is None or r.newest in (-1, r.stamp.version) for r in w.replicas)


def not_disturbed(w: World) -> bool:
    """Returns whether replicas serve what the coordinator told them to, until they are killed or told otherwise."""
    c = w.coordinator
    if c.at not in ("generating", "collecting"):
        return True
    return all(r.stamp == c.stamp for r in w.replicas if r.view == "serving" and r.token == c.token)


def one_effect(w: World) -> bool:
    """Returns whether every finished step is one update, by exactly the batch that is recorded for it."""
    steps = [finished for finished in w.ledger.finished if finished]
    applied = {(update.batch, update.after) for update in w.updates}
    return all(step in applied for step in steps)


def recorded_first(w: World) -> bool:
    """Returns whether what the trainer has applied is on disk, so that its coordinator can be killed at any time."""
    last = w.trainer.last
    return last is None or last.is_foreign or last in w.ledger.collected


def saved_as_finished(w: World) -> bool:
    """Returns whether the recorded checkpoint is complete and has the weights of its finished step."""
    saved, finished = w.disk[w.ledger.saved], w.ledger.finished[w.ledger.saved]
    return w.ledger.saved == 0 or bool(saved and finished and saved.weights == finished[1])


def one_owner(w: World) -> bool:
    return all(update.is_owners for update in w.updates)


def turns_of_one_stamp(w: World) -> bool:
    """Returns whether all turns of each trained sample come from the weights that its stamp names."""
    batches = (update.batch for update in w.updates)
    return all(turn == batch.stamp for batch in batches for turn in batch.turns)


def acts_once(w: World) -> bool:
    return not w.environment.has_acted_twice


INVARIANTS: Mapping[str, Callable[[World], bool]] = {
    "every batch is trained on by exactly the weights that it was drawn from": on_policy,
    "replicas serve only what was hashed equal on all members": served_as_stamped,
    "versions that a replica serves never go back within a session": never_backwards,
    "no late call disturbs a replica that serves": not_disturbed,
    "a batch id has one effect, that of the recorded batch": one_effect,
    "only the coordinator that opened the run last trains": one_owner,
    "a batch is on disk before the trainer applies it": recorded_first,
    "a recorded checkpoint is that of its step": saved_as_finished,
    "with a lag k, batch t is drawn from version t - k": drawn_from_one_version,
    "an update applies the gradients of its batch and of nothing else": nothing_else_applied,
    "an engine that sleeps serves nothing": silent_asleep,
    "all turns of a trained sample are drawn at one stamp": turns_of_one_stamp,
    "a turn of an episode has one effect on its environment": acts_once,
}


def is_finished(w: World) -> bool:
    """Returns whether the run has done all steps, its last checkpoint is recorded, and no episode is left open.

    At its end, a real run closes the open episodes if it can reach the service; here only their leases end them.
    """
    is_done = w.coordinator.at == "done" and w.ledger.last == w.num_steps == w.ledger.saved
    return is_done and not w.environment.sessions
