"""Models what only some configs do: stream blocks of a batch, and let replicas sleep while the trainer works."""

from collections.abc import Iterator

from tests.model.coordinator import at, drawing, ended, moved, samples_came, synced
from tests.model.services import apply_gradients, refusal, trainer_answers
from tests.model.state import (
    Answer,
    Batch,
    Replica,
    Request,
    Rules,
    World,
    answered,
    is_lost,
    sent,
    taken,
    with_replica,
)

# Streamed blocks: services/coordinator/rl/step.py, services/trainer/stream.py. Here one block is the whole batch.


def can_stream(w: World, rules: Rules) -> bool:
    return w.mode.streams and samples_came(w, rules)


def stream(w: World, rules: Rules) -> Iterator[World]:
    """Sends the block as soon as it is complete; the batch is not on disk yet."""
    c, (index, r) = w.coordinator, drawing(w)
    batch = Batch(c.version, *r.answer.value)
    w = with_replica(w, index, r._replace(waits=None, answer=None))
    inbox = (*w.trainer.inbox, Request("block", c.token, batch))
    yield moved(w._replace(trainer=w.trainer._replace(inbox=inbox)), "streaming", streamed=batch, batch=batch)


def record_streamed(w: World, rules: Rules) -> Iterator[World]:
    yield moved(w._replace(ledger=synced(w.ledger, w.coordinator.batch)), "recording")


def has_streamed(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "recording" and w.coordinator.streamed == w.coordinator.batch


def may_send(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "recording" and not has_streamed(w, rules) and not must_sleep(w, rules)


def commit_blocks(w: World, rules: Rules) -> Iterator[World]:
    c = w.coordinator
    trainer = sent(w.trainer, "apply", c.token, c.batch)
    yield moved(w._replace(trainer=trainer), "training", is_ahead=False, streamed=None)


def is_stream_lost(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "training" and bool(w.trainer.answer) and w.trainer.answer.word == "lost"


def take_block(w: World, rules: Rules, request: Request) -> World:
    """Computes the gradients of a block. Nothing is applied."""
    t, batch = w.trainer, request.about
    if refusal(t, request, rules) or not (t.is_published and batch.stamp == t.weights):
        return w._replace(trainer=taken(t, request))
    kept = () if rules.blocks_begin_anew else t.gradients
    w = w._replace(trainer=taken(t, request)._replace(arrived=batch, gradients=(*kept, batch)))
    return w if rules.commit_awaited else apply_gradients(w, batch, is_owners=request.token == t.token)


def apply_blocks(w: World, rules: Rules, request: Request) -> World:
    """Applies the gradients, if the stream is still open and its blocks are those of the committed batch."""
    t, batch = w.trainer, request.about
    if why := refusal(t, request, rules):
        return trainer_answers(w, request, "refused", why)
    if t.last == batch and t.weights.version == batch.version + 1:
        return trainer_answers(w, request, "trained", t.weights.version)
    if t.arrived is None:
        return trainer_answers(w, request, "lost")
    if rules.blocks_compared and t.arrived != batch:
        return trainer_answers(w, request, "refused", "corrupt")
    w = apply_gradients(w, t.arrived, is_owners=request.token == t.token)
    return trainer_answers(w, request, "trained", w.trainer.weights.version)


is_sent = at("streaming")


def is_streaming(w: World, rules: Rules) -> bool:
    return w.coordinator.streamed is not None or _commits(w)


def break_stream(w: World, rules: Rules) -> Iterator[World]:
    """Breaks the coordinator's stream. What it has sent arrives later, or never."""
    t = w.trainer
    answer = Answer("lost") if _commits(w) else t.answer
    late = moved(w, w.coordinator.at, streamed=None)._replace(trainer=t._replace(answer=answer))
    yield late
    inbox = tuple(one for one in t.inbox if one.method not in ("block", "apply"))
    yield late._replace(trainer=late.trainer._replace(inbox=inbox, arrived=None))


def _commits(w: World) -> bool:
    waits = w.trainer.waits
    return w.coordinator.at == "training" and waits is not None and waits.method == "apply"


def has_block(w: World, rules: Rules) -> bool:
    return w.trainer.arrived is not None and not w.trainer.arrived.is_foreign


def flip_block(w: World, rules: Rules) -> Iterator[World]:
    """Changes the block that has arrived, so that it is not what was sent."""
    wrong = w.trainer.arrived._replace(is_foreign=True)
    yield w._replace(trainer=w.trainer._replace(arrived=wrong, gradients=(*w.trainer.gradients[:-1], wrong)))


# Replicas that sleep: services/coordinator/rl/publishing.py, services/rollout/servicer.py


def must_sleep(w: World, rules: Rules) -> bool:
    return w.mode.sleeps and w.coordinator.at == "recording" and any(r.view == "serving" for r in w.replicas)


def let_sleep(w: World, rules: Rules) -> Iterator[World]:
    c = w.coordinator
    replicas = [sent(r, "sleep", c.token)._replace(view="stale") if r.view == "serving" else r for r in w.replicas]
    yield moved(w._replace(replicas=tuple(replicas)), "sleeping")


def sleeping(w: World) -> list[Replica]:
    return [r for r in w.replicas if r.waits and r.waits.method == "sleep"]


def all_sleep(w: World, rules: Rules) -> bool:
    return w.coordinator.at == "sleeping" and all(r.answer or is_lost(r) for r in sleeping(w))


def go_on_asleep(w: World, rules: Rules) -> Iterator[World]:
    """Goes on while replicas sleep; one that was lost meanwhile has no memory: it is dropped and opened again."""
    if any(r.answer and r.answer.value == "replaced" for r in sleeping(w)):
        yield ended(w)
        return
    slept = sleeping(w)
    replicas = [
        r._replace(view="stale" if r.is_asleep else "dead", waits=None, answer=None) if r in slept else r
        for r in w.replicas
    ]
    yield moved(w._replace(replicas=tuple(replicas)), "recording")


def replica_sleeps(r: Replica, rules: Rules, request: Request) -> Replica:
    """Drops the weights of the replica, which serves nothing then."""
    stamp = None if rules.sleep_ends_serving else r.stamp
    return answered(r, request, "asleep")._replace(is_asleep=True, content=None, stamp=stamp, received=None)
