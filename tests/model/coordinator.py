"""Models the coordinator: opening, publications, steps, checkpoints. See services/coordinator/rl/loop.py."""

from collections.abc import Iterator

from tests.model.batches import next_to_draw, recorded_batch
from tests.model.state import (
    MAX_ATTEMPTS,
    Batch,
    Coordinator,
    Ledger,
    Replica,
    Request,
    Rules,
    Trainer,
    Weights,
    World,
    is_lost,
    sent,
    with_replica,
)


def ended(w: World) -> World:
    """Returns the world without the coordinator. Its calls that are under way may still arrive."""
    calm = {"waits": None, "answer": None}
    return w._replace(
        coordinator=Coordinator(token=w.coordinator.token),
        trainer=w.trainer._replace(**calm, saved=None),
        replicas=tuple(r._replace(**calm, view="dead") for r in w.replicas),
        ledger=w.ledger._replace(unsynced=None),
        environment=w.environment._replace(**calm, view="dead") if w.mode.turns else w.environment,
    )


def at(*places: str):
    """Returns a guard that holds while the coordinator is at one of `places`."""
    return lambda w, rules: w.coordinator.at in places


def moved(w: World, place: str, **changes: object) -> World:
    return w._replace(coordinator=w.coordinator._replace(at=place, **changes))


# Opening: services/coordinator/fleet/opening.py, rl/session.py


def start(w: World, rules: Rules) -> Iterator[World]:
    token = w.coordinator.token + 1
    trainer = sent(w.trainer, "open", token, w.ledger.saved)
    yield w._replace(coordinator=Coordinator("opening trainer", token), trainer=trainer)


def trainer_opened(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "opening trainer" and bool(w.trainer.answer) and w.trainer.answer.word == "opened"


def take_version(w: World, rules: Rules) -> Iterator[World]:
    """Takes the trainer's version, maybe a step ahead of the record: Run.last_finished and Run.unfinished_stamp."""
    held, last_id = w.trainer.answer.value
    is_ahead = w.ledger.last == held - 1 and last_id == held - 1
    batch = w.ledger.collected[held - 1] if is_ahead else None
    w = w._replace(trainer=w.trainer._replace(waits=None, answer=None))
    if is_ahead and batch is None:  # the run ends with DATA_LOSS, and the user restarts the trainer, as told
        yield ended(w)._replace(trainer=Trainer())
        return
    version = held - 1 if is_ahead else held
    yield moved(w, "opening replicas", version=version, is_ahead=is_ahead, batch=batch, stamp=batch and batch.stamp)


def open_replica(w: World, rules: Rules, index: int) -> Iterator[World]:
    """Opens the run on a replica, with a new engine if it has none; also after it was lost during the run."""
    r = w.replicas[index]
    engine = r if r.is_open else Replica(is_open=True, inbox=r.inbox)
    yield with_replica(w, index, engine._replace(token=w.coordinator.token, newest=-1, seat=0, view="stale"))


def can_open_replica(w: World, rules: Rules, index: int) -> bool:
    r = w.replicas[index]
    is_busy = r.stage in ("joining", "receiving")
    return w.coordinator.at not in ("down", "opening trainer", "done") and r.view == "dead" and not is_busy


def begin(w: World, rules: Rules) -> Iterator[World]:
    yield moved(w._replace(ledger=w.ledger._replace(last=w.coordinator.version)), "begun")


def can_adopt(w: World, rules: Rules) -> bool:
    """Returns whether a checkpoint before the trainer's version is complete but unrecorded: Run.adopt_checkpoint."""
    c = w.coordinator
    step = c.version if c.is_ahead else c.version - 1
    if c.at != "begun" or step < 1 or w.ledger.finished[step] is None or w.ledger.saved >= step:
        return False
    files = w.disk[step]
    return files is not None and files.last.version == step - 1


def adopt(w: World, rules: Rules) -> Iterator[World]:
    c = w.coordinator
    yield w._replace(ledger=w.ledger._replace(saved=c.version if c.is_ahead else c.version - 1))


def can_go_on(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "begun" and not can_adopt(w, rules)


def go_on(w: World, rules: Rules) -> Iterator[World]:
    yield moved(w, "recording" if w.coordinator.is_ahead else "publishing")


def replicas_opened(w: World, rules: Rules) -> bool:
    is_open = w.mode.turns == 0 or w.environment.view == "open"
    return w.coordinator.at == "opening replicas" and is_open and all(r.view == "stale" for r in w.replicas)


# Publication: services/coordinator/rl/publishing.py


def has_group(w: World) -> bool:
    epoch = w.coordinator.epoch
    return epoch > 0 and all((r.seat == epoch) == (r.view != "dead") for r in w.replicas)


def needs_group(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "publishing" and not has_group(w) and any(r.view != "dead" for r in w.replicas)


def has_group_to_use(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "publishing" and has_group(w) and any(r.view != "dead" for r in w.replicas)


def has_no_replica(w: World, rules: Rules) -> bool:
    """Returns whether no replica can receive a publication or, where samples are needed, none serves."""
    c, views = w.coordinator, [r.view for r in w.replicas]
    if c.at == "publishing":
        return all(view == "dead" for view in views)
    return must_draw(w, rules) and "serving" not in views


def form_group(w: World, rules: Rules) -> Iterator[World]:
    epoch, token = w.ledger.epoch + 1, w.coordinator.token
    w = w._replace(ledger=w.ledger._replace(epoch=epoch), trainer=sent(w.trainer, "join", token, epoch))
    replicas = [r if r.view == "dead" else sent(r, "join", token, epoch)._replace(seat=epoch) for r in w.replicas]
    yield moved(w._replace(replicas=tuple(replicas)), "joining", epoch=epoch)


def send(w: World, rules: Rules) -> Iterator[World]:
    c = w.coordinator
    about = c.epoch, c.version
    replicas = [
        sent(r, "receive", c.token, about)._replace(view="stale") if r.seat == c.epoch else r for r in w.replicas
    ]
    w = w._replace(trainer=sent(w.trainer, "send", c.token, about), replicas=tuple(replicas))
    yield moved(w, "sending")


def members(w: World) -> list[Replica]:
    return [r for r in w.replicas if r.seat == w.coordinator.epoch]


def all_answered(place: str, word_of_trainer: str, word: str):
    """Returns a guard that holds at `place` once all replicas of the group have answered with `word`.

    The trainer must have answered with `word_of_trainer` too, unless that is empty.
    """

    def guard(w: World, rules: Rules) -> bool:
        if w.coordinator.at != place:
            return False
        trainer = not word_of_trainer or (w.trainer.answer and w.trainer.answer.word == word_of_trainer)
        return bool(trainer) and all(r.answer and r.answer.word == word for r in members(w))

    return guard


def all_received(w: World, rules: Rules) -> bool:
    return all_answered("sending", "sent", "received")(w, rules)


def are_equal(w: World) -> bool:
    return all(r.answer.value == w.trainer.answer.value for r in members(w))


def can_commit(w: World, rules: Rules) -> bool:
    return all_received(w, rules) and (are_equal(w) or not rules.digests_compared)


def must_reject(w: World, rules: Rules) -> bool:
    return all_received(w, rules) and not can_commit(w, rules)


def commit(w: World, rules: Rules) -> Iterator[World]:
    stamp: Weights = w.trainer.answer.value
    compared = w.compared | {stamp} if are_equal(w) else w.compared
    replicas = [sent(r, "commit", w.coordinator.token, stamp) if r in members(w) else r for r in w.replicas]
    trainer = w.trainer._replace(waits=None, answer=None)
    yield moved(w._replace(compared=compared, replicas=tuple(replicas), trainer=trainer), "committing", stamp=stamp)


def published(w: World, rules: Rules) -> Iterator[World]:
    """Records the publication."""
    replicas = [r._replace(view="serving", waits=None, answer=None) if r in members(w) else r for r in w.replicas]
    place = "finishing step" if w.coordinator.batch else "saving"
    yield moved(w._replace(replicas=tuple(replicas)), place, attempts=0)


def attempt_failed(w: World, rules: Rules) -> bool:
    """Returns whether a member of the weight group has refused its call, or will never answer it."""
    if w.coordinator.at not in ("joining", "sending", "committing"):
        return False
    all_members = [w.trainer, *members(w)]
    return any(is_lost(m) or (m.answer and m.answer.word == "refused") for m in all_members)


def fail_attempt(w: World, rules: Rules) -> Iterator[World]:
    """Drops the members that are gone; the next attempt has a new epoch."""
    c, t = w.coordinator, w.trainer
    is_replaced = any(m.answer and m.answer.value == "replaced" for m in (t, *w.replicas))
    lost = [r.view != "dead" and not r.is_open for r in w.replicas]
    if is_replaced or not t.is_open or (not any(lost) and c.attempts + 1 >= MAX_ATTEMPTS):
        yield ended(w)
        return
    replicas = [
        r if r.view == "dead" else r._replace(view="dead" if is_gone else "stale", waits=None, answer=None)
        for r, is_gone in zip(w.replicas, lost, strict=True)
    ]
    w = w._replace(replicas=tuple(replicas), trainer=t._replace(waits=None, answer=None))
    yield moved(w, "publishing", epoch=0, attempts=c.attempts + 1)


# Steps: services/coordinator/rl/loop.py, runs/run.py, runs/record.py


def can_take_recorded(w: World, rules: Rules) -> bool:
    """Returns whether the recorded batch is next; a save in progress ends first, as it needs unchanged weights."""
    if w.coordinator.at != "generating" or w.coordinator.saving or recorded_batch(w, rules) is None:
        return False
    return w.mode.lag == 0 or not rules.lag_drained or next_to_draw(w) is None


def must_draw(w: World, rules: Rules) -> bool:
    if w.coordinator.at != "generating":
        return False
    return recorded_batch(w, rules) is None or (w.mode.lag > 0 and next_to_draw(w) is not None)


def must_generate(w: World, rules: Rules) -> bool:
    has_begun = w.mode.turns == 0 or w.coordinator.episode > 0
    return must_draw(w, rules) and has_begun and any(r.view == "serving" for r in w.replicas)


def take_recorded(w: World, rules: Rules) -> Iterator[World]:
    yield moved(w, "recording", batch=recorded_batch(w, rules))


def generate(w: World, rules: Rules) -> Iterator[World]:
    c = w.coordinator
    for index, r in enumerate(w.replicas):
        if r.view == "serving":
            yield moved(with_replica(w, index, sent(r, "generate", c.token, c.stamp)), "collecting")


def drawing(w: World) -> tuple[int, Replica] | None:
    waiting = [(index, r) for index, r in enumerate(w.replicas) if r.waits and r.waits.method == "generate"]
    return waiting[0] if waiting else None


def samples_came(w: World, rules: Rules) -> bool:
    one = drawing(w) if w.coordinator.at == "collecting" else None
    return one is not None and one[1].answer is not None and one[1].answer.word == "samples"


def has_sample(w: World, rules: Rules) -> bool:
    return w.mode.turns == 0 and samples_came(w, rules)


def record_batch(w: World, rules: Rules) -> Iterator[World]:
    """Writes the batch and its row to disk."""
    index, r = drawing(w)
    batch = Batch(next_to_draw(w), *r.answer.value)
    ledger = synced(w.ledger, batch) if rules.synced_rows else w.ledger._replace(unsynced=batch)
    w = with_replica(w, index, r._replace(waits=None, answer=None))._replace(ledger=ledger)
    yield moved(w, "generating") if w.mode.lag else moved(w, "recording", batch=batch)


def synced(ledger: Ledger, batch: Batch) -> Ledger:
    collected = list(ledger.collected)
    collected[batch.version] = batch
    return ledger._replace(collected=tuple(collected), unsynced=None)


def draw_failed(w: World, rules: Rules) -> bool:
    one = drawing(w) if w.coordinator.at == "collecting" else None
    return one is not None and (is_lost(one[1]) or bool(one[1].answer and one[1].answer.word == "refused"))


def draw_elsewhere(w: World, rules: Rules) -> Iterator[World]:
    """Gives the group to another replica; the one that failed is opened again."""
    index, r = drawing(w)
    if r.answer and r.answer.value == "replaced":
        yield ended(w)
        return
    lost = r._replace(view="dead", waits=None, answer=None)
    yield moved(with_replica(w, index, lost), "generating")


def train(w: World, rules: Rules) -> Iterator[World]:
    c = w.coordinator
    yield moved(w._replace(trainer=sent(w.trainer, "train", c.token, c.batch)), "training", is_ahead=False)


def trained(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "training" and bool(w.trainer.answer) and w.trainer.answer.word == "trained"


def take_trained(w: World, rules: Rules) -> Iterator[World]:
    version = w.trainer.answer.value
    w = w._replace(trainer=w.trainer._replace(waits=None, answer=None))
    yield moved(w, "publishing", version=version)


def finish_step(w: World, rules: Rules) -> Iterator[World]:
    c, ledger = w.coordinator, w.ledger
    finished = list(ledger.finished)
    finished[c.version] = ledger.collected[c.version - 1], c.stamp
    w = w._replace(ledger=ledger._replace(last=c.version, finished=tuple(finished)))
    yield moved(w, "saving", batch=None)


# Checkpoints, written while the next batch is generated: services/coordinator/runs/checkpoints.py


def is_due(w: World) -> bool:
    return w.coordinator.version > 0 and w.ledger.saved < w.coordinator.version


def can_save(w: World, rules: Rules) -> bool:
    """Returns whether a checkpoint is due and none is being saved, as only one is saved at a time."""
    return w.coordinator.at == "saving" and is_due(w) and not w.coordinator.saving


def begin_save(w: World, rules: Rules) -> Iterator[World]:
    c, disk = w.coordinator, list(w.disk)
    if rules.leftovers_removed:
        disk[c.version] = None
    request = Request("save", c.token, c.version)
    trainer = w.trainer._replace(inbox=(*w.trainer.inbox, request), saved=None)
    yield moved(w._replace(trainer=trainer, disk=tuple(disk)), next_place(w), saving=c.version)


def next_place(w: World) -> str:
    return "generating" if w.coordinator.version < w.num_steps else "ending"


def is_saved_already(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "saving" and not is_due(w)


def skip_save(w: World, rules: Rules) -> Iterator[World]:
    yield moved(w, next_place(w))


def record_save(w: World, rules: Rules) -> Iterator[World]:
    w = w._replace(ledger=w.ledger._replace(saved=w.coordinator.saving), trainer=w.trainer._replace(saved=None))
    yield moved(w, w.coordinator.at, saving=0)


def is_saved(w: World, rules: Rules) -> bool:
    return w.coordinator.saving > 0 and bool(w.trainer.saved) and w.trainer.saved.word == "saved"


def trainer_failed(w: World, rules: Rules) -> bool:
    """Returns whether the trainer has refused or lost a call, which ends the run with the trainer's error."""
    c, t = w.coordinator, w.trainer
    if c.at in ("opening trainer", "training") and (is_lost(t) or (t.answer and t.answer.word == "refused")):
        return True
    if not c.saving or c.at not in ("saving", "generating", "ending"):
        return False
    if t.saved:
        return t.saved.word == "refused"
    asked = any(request.method == "save" and request.token == c.token for request in t.inbox)
    return not asked and not (t.copied and t.copied.token == c.token)


def is_at_the_end(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "ending" and not w.coordinator.saving


def finish_run(w: World, rules: Rules) -> Iterator[World]:
    yield moved(w, "done")


def end(w: World, rules: Rules) -> Iterator[World]:
    """Ends the run. If the trainer has applied another batch than the recorded one, the user restarts it, as told."""
    t = w.trainer
    must_restart = t.answer is not None and t.answer.value == "replayed"
    yield ended(w)._replace(trainer=Trainer()) if must_restart else ended(w)
