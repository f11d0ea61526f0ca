"""Models what the services do with calls, whoever sent them.

See services/trainer/servicer.py and services/rollout/servicer.py.
"""

from collections.abc import Callable, Iterator

from tests.model.state import (
    Answer,
    Batch,
    Checkpoint,
    Order,
    Replica,
    Request,
    Rules,
    Trainer,
    Transition,
    Update,
    Weights,
    World,
    answered,
    for_each_replica,
    taken,
    with_replica,
)

BASE = Weights(0, 0)  # the weights of the model directory


def receives(
    method: str, act: Callable[[World, Rules, Request], World], is_ready: Callable[[Trainer], bool]
) -> list[Transition]:
    """Returns the transitions in which the trainer handles a call of `method`, when it `is_ready`."""

    def handling(is_late: bool) -> Transition:
        def requests(w: World) -> set[Request]:
            t = w.trainer
            ours = {one for one in t.inbox if one.method == method and (one != t.waits) == is_late}
            return {request for request in ours if is_in_order(t, request)}

        def guard(w: World, rules: Rules) -> bool:
            return bool(w.trainer.inbox) and is_ready(w.trainer) and bool(requests(w))

        def effect(w: World, rules: Rules) -> Iterator[World]:
            return (act(w, rules, request) for request in requests(w))

        name = f"the trainer handles {'a late ' if is_late else ''}{method}"
        return Transition(name, guard, effect, order=Order.FREE if is_late else Order.CURRENT)

    return [handling(is_late=False), handling(is_late=True)]


def is_in_order(t: Trainer, request: Request) -> bool:
    """Returns whether the trainer can get this call now.

    A batch is sent long after the request to save, and arrives after it, unless that request is lost.
    """
    if request.method != "train":
        return True
    before = t.inbox[: t.inbox.index(request)]
    return not any(one.method == "save" and one.token == request.token for one in before)


def refusal(service: Trainer | Replica, request: Request, rules: Rules) -> str:
    """Returns why a call other than OpenRun is refused (its fencing token, or no open run); an empty text if not."""
    if rules.fencing_token and service.token not in (0, request.token):
        return "replaced"
    return "" if service.is_open else "not open"


def trainer_answers(w: World, request: Request, word: str, value: object = None, **changes: object) -> World:
    return w._replace(trainer=answered(w.trainer, request, word, value)._replace(**changes))


def open_run(w: World, rules: Rules, request: Request) -> World:
    """Opens the run: the trainer keeps what it holds of this run, or loads the checkpoint or the model."""
    t = w.trainer
    if rules.fencing_token and request.token in t.tokens and request.token != t.token:
        return trainer_answers(w, request, "refused", "replaced")
    changes: dict[str, object] = {"token": request.token, "tokens": t.tokens | {request.token}}
    weights, last = t.weights, t.last
    if not t.is_open or (w.mode.lag and weights.version != request.about):  # with a lag it goes back: Trainer.go_back
        loaded = w.disk[request.about] if request.about else None
        weights, last, kept = (loaded.weights, loaded.last, loaded.kept) if loaded else (BASE, None, ())
        changes |= {"is_open": True, "weights": weights, "last": last, "kept": kept, "is_published": False}
    assert weights
    held = weights.version, last.version if last else None
    return trainer_answers(w, request, "opened", held, **changes)


def join(w: World, rules: Rules, request: Request) -> World:
    t = w.trainer
    if why := refusal(t, request, rules) or ("old epoch" if rules.epoch_fence and request.about <= t.epoch else ""):
        return trainer_answers(w, request, "refused", why)
    return with_stage(w, request, stage="joining", epoch=request.about)


def with_stage(w: World, request: Request, **changes: object) -> World:
    """Takes up a call that all members answer together."""
    return w._replace(trainer=taken(w.trainer, request)._replace(**changes))


def send(w: World, rules: Rules, request: Request) -> World:
    t, (epoch, version) = w.trainer, request.about
    why = refusal(t, request, rules)
    if not why and rules.epoch_fence and epoch != t.epoch:
        why = "not joined"
    if not why and t.stage != "joined":
        why = "not joined"
    if not why and version != t.weights.version:
        why = "stale"
    return trainer_answers(w, request, "refused", why) if why else with_stage(w, request, stage="sending")


def train(w: World, rules: Rules, request: Request) -> World:
    """Applies a batch once: another call with its id is answered from memory."""
    t, batch = w.trainer, request.about
    if why := refusal(t, request, rules):
        return trainer_answers(w, request, "refused", why)
    if rules.batch_id and t.last and t.last.version == batch.version:
        is_same = t.last == batch or not rules.contents_compared
        if batch.version + 1 != t.weights.version or not is_same:
            return trainer_answers(w, request, "refused", "replayed")
        return trainer_answers(w, request, "trained", t.weights.version)
    if rules.stamp_compared and not may_train(w, batch):
        return trainer_answers(w, request, "refused", "stale")
    w = apply_gradients(w._replace(trainer=t._replace(gradients=(batch,))), batch, is_owners=request.token == t.token)
    return trainer_answers(w, request, "trained", w.trainer.weights.version)


def may_train(w: World, batch: Batch) -> bool:
    """Returns whether the batch is for the published weights and drawn from them or, with a lag, from earlier ones."""
    t = w.trainer
    if not t.is_published:
        return False
    return batch.stamp == t.weights if not w.mode.lag else batch.version == t.weights.version and batch.stamp in t.kept


def apply_gradients(w: World, batch: Batch, *, is_owners: bool) -> World:
    """Applies the gradients that the ranks hold, as the update by `batch`."""
    t = w.trainer
    version = t.weights.version + 1
    after = Weights(version, 1 + max((one.after.salt for one in w.updates if one.after.version == version), default=-1))
    update = Update(t.weights, batch, after, is_owners, t.gradients == (batch,))
    t = t._replace(weights=after, last=batch, is_published=False, arrived=None, gradients=())
    return w._replace(updates=(*w.updates, update), trainer=t)


def save(w: World, rules: Rules, request: Request) -> World:
    """Copies the weights; the files are written in the background."""
    t = w.trainer
    why = refusal(t, request, rules)
    if not why and rules.versioned_save and request.about != t.weights.version:
        why = "stale"
    if not why and w.disk[request.about]:
        why = "" if w.disk[request.about].weights == t.weights else "exists"
        return save_answers(w, request, why)
    if why:
        return save_answers(w, request, why)
    copied = Checkpoint(request.about, t.weights, t.last, request.token, t.kept)
    return w._replace(trainer=taken(t, request)._replace(copied=copied, arrived=None))  # a save ends a stream of blocks


def save_answers(w: World, request: Request, why: str) -> World:
    t = taken(w.trainer, request)
    if request.token == w.coordinator.token and w.coordinator.saving == request.about:
        t = t._replace(saved=Answer("refused" if why else "saved", why))
    return w._replace(trainer=t)


def is_copying(w: World, rules: Rules) -> bool:
    return w.trainer.copied is not None


def complete_save(w: World, rules: Rules) -> Iterator[World]:
    """Writes the manifest, which is the last file."""
    t, c, disk = w.trainer, w.coordinator, list(w.disk)
    disk[t.copied.step] = t.copied._replace(token=0)
    is_awaited = t.copied.token == c.token and c.saving == t.copied.step
    t = t._replace(copied=None, saved=Answer("saved") if is_awaited else t.saved)
    yield w._replace(disk=tuple(disk), trainer=t)


# Members of the weight group work together: services/common/weights/group.py


def seated(w: World) -> list[Replica]:
    return [r for r in w.replicas if r.seat == w.trainer.epoch and r.seat > 0]


def all_in(own: str, others: str):
    """Returns a guard that holds once the trainer is in stage `own` and all replicas of its epoch in `others`."""

    def guard(w: World, rules: Rules) -> bool:
        t = w.trainer
        return t.stage == own and bool(seated(w)) and all(r.stage == others and r.epoch == t.epoch for r in seated(w))

    return guard


def done_together(service, word: str, value: object = None, **changes: object):
    """Returns the service after a joint call, with its answer if somebody waits for it."""
    answer = service.answer if is_abandoned(service) else Answer(word, value)
    return service._replace(stage="joined", answer=answer, **changes)


def meet(w: World, rules: Rules) -> Iterator[World]:
    replicas = [done_together(r, "joined") if r in seated(w) else r for r in w.replicas]
    yield w._replace(trainer=done_together(w.trainer, "joined"), replicas=tuple(replicas))


def broadcast(w: World, rules: Rules) -> Iterator[World]:
    weights = w.trainer.weights
    replicas = [arrived(r, weights, rules) if r in seated(w) else r for r in w.replicas]
    lag = w.mode.lag
    kept = (*(one for one in w.trainer.kept if weights.version - lag <= one.version < weights.version), weights)
    trainer = done_together(w.trainer, "sent", weights, is_published=True, kept=kept if lag else ())
    yield w._replace(trainer=trainer, replicas=tuple(replicas))


def arrived(r: Replica, weights: Weights, rules: Rules) -> Replica:
    """Returns the replica with these weights in its engine and their digest."""
    r = done_together(r, "received", weights, content=weights, received=weights)
    return r if rules.second_phase else r._replace(stamp=weights, newest=max(r.newest, weights.version))


def is_abandoned(service) -> bool:
    """Returns whether the joint call in progress was canceled, or its caller is gone."""
    waits = service.waits
    return waits is None or waits in service.inbox or waits.method not in ("join", "send", "receive")


def trainer_waits_in_vain(w: World, rules: Rules) -> bool:
    return w.trainer.stage in ("joining", "sending") and is_abandoned(w.trainer)


def give_up(w: World, rules: Rules) -> Iterator[World]:
    yield w._replace(trainer=w.trainer._replace(stage=""))


# Replicas


def replica_receives(method: str, act: Callable[[Replica, Rules, Request], Replica]) -> list[Transition]:
    """Returns the transitions in which a replica handles a call of `method`."""

    def handling(is_late: bool) -> list[Transition]:
        def requests(r: Replica) -> set[Request]:
            return {one for one in r.inbox if one.method == method and (one != r.waits) == is_late}

        def guard(w: World, rules: Rules, index: int) -> bool:
            r = w.replicas[index]
            return bool(r.inbox) and r.stage in ("", "joined") and bool(requests(r))

        def effect(w: World, rules: Rules, index: int) -> Iterator[World]:
            r = w.replicas[index]
            for request in requests(r):
                why = refusal(r, request, rules)
                then = answered(r, request, "refused", why) if why else act(r, rules, request)
                yield with_replica(w, index, then)

        name = f"a replica handles {'a late ' if is_late else ''}{method}"
        return for_each_replica(name, guard, effect, order=Order.FREE if is_late else Order.CURRENT)

    return [*handling(is_late=False), *handling(is_late=True)]


def replica_joins(r: Replica, rules: Rules, request: Request) -> Replica:
    if rules.epoch_fence and request.about <= r.epoch:
        return answered(r, request, "refused", "old epoch")
    return taken(r, request)._replace(stage="joining", epoch=request.about)


def replica_receives_weights(r: Replica, rules: Rules, request: Request) -> Replica:
    """Stops serving at once. A replica that sleeps is woken first."""
    epoch, _ = request.about
    if r.stage != "joined" or (rules.epoch_fence and epoch != r.epoch):
        return answered(r, request, "refused", "not joined")
    return taken(r, request)._replace(stage="receiving", stamp=None, received=None, is_asleep=False)


def replica_commits(r: Replica, rules: Rules, request: Request) -> Replica:
    if r.stamp is not None and r.stamp == request.about:
        return answered(r, request, "committed")
    if r.received is None or (rules.digest_in_commit and r.received != request.about):
        return answered(r, request, "refused", "another digest")
    newest = max(r.newest, request.about.version)
    return answered(r, request, "committed")._replace(stamp=request.about, received=None, newest=newest)


def replica_generates(r: Replica, rules: Rules, request: Request) -> Replica:
    if r.stamp is None or r.stamp != request.about:
        return answered(r, request, "refused", "not serving")
    return answered(r, request, "samples", (r.content, r.stamp))


def replica_waits_in_vain(w: World, rules: Rules, index: int) -> bool:
    r = w.replicas[index]
    return r.stage in ("joining", "receiving") and is_abandoned(r)


def replica_gives_up(w: World, rules: Rules, index: int) -> Iterator[World]:
    yield with_replica(w, index, w.replicas[index]._replace(stage=""))


def is_idle(t: Trainer) -> bool:
    return t.stage != "sending"


def is_free(t: Trainer) -> bool:
    return t.stage != "sending" and t.copied is None
