"""Which recorded batch the coordinator trains on, and which it draws next. See rl/step.py: sample."""

from tests.model.state import Batch, Rules, World


def recorded_batch(w: World, rules: Rules):
    """Returns the recorded batch that was drawn from exactly the stamp that is trained now."""
    c = w.coordinator
    batch = w.ledger.collected[c.version] if c.version < w.num_steps else None
    if not rules.stamp_of_draw:
        return batch and batch._replace(stamp=c.stamp)
    return batch if batch and is_usable(w, batch) else None


def is_usable(w: World, batch: Batch) -> bool:
    """Returns whether a recorded batch need not be drawn again. With a lag, it may be of older weights: lagged.draw."""
    stamp = w.coordinator.stamp
    return batch.stamp == stamp or (w.mode.lag > 0 and batch.stamp.version < stamp.version)


def next_to_draw(w: World) -> int | None:
    """Returns the version that the next batch to be drawn will update; None if all that are due are recorded."""
    version = w.coordinator.version
    for number in range(version, min(version + w.mode.lag + 1, w.num_steps)):
        batch = w.ledger.collected[number]
        if batch is None or not is_usable(w, batch):
            return number
    return None
