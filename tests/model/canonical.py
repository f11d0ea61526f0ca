"""Gives states that differ only in names one form, so that the search visits them once."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.model.state import CORRUPT, Coordinator, Environment, Request, Rules, Weights, World

_EPOCHS = ("join", "send", "receive")  # methods whose calls have an epoch
_OF_EPISODES = ("reset", "step", "close")


def canonical(world: World, rules: Rules) -> World:
    """Returns the form of `world`.

    Replicas are interchangeable. Calls that would be refused whenever they arrive are forgotten. Of tokens, epochs and
    salts only the order counts, so they are numbered anew. What no process and no file remembers is forgotten.
    """
    c = world.coordinator
    trainer = _purged(world.trainer, c, rules)
    opens = {one.token for one in trainer.inbox if one.method == "open"}
    trainer = trainer._replace(tokens=trainer.tokens & (opens | {trainer.token}))
    replicas = tuple(_purged(replica, c, rules) for replica in world.replicas)
    world = world._replace(trainer=trainer, replicas=replicas)
    if world.mode.turns:
        environment = _without_abandoned(world.environment, c) if rules.episodes_leased else world.environment
        world = _with_episodes(world._replace(environment=_purged(environment, c, rules)))
    world = _renumbered(world)
    if any(update.after.salt for update in world.updates) or len(world.updates) > (trainer.weights or (0,))[0]:
        world = _with_new_salts(world)
    one, other = world.replicas
    return world._replace(replicas=(other, one)) if hash(other) < hash(one) else world


def _purged(service: Any, c: Coordinator, rules: Rules) -> Any:
    if not service.inbox:
        return service
    inbox = tuple(one for one in service.inbox if one == service.waits or not _is_void(service, one, c, rules))
    return service if len(inbox) == len(service.inbox) else service._replace(inbox=inbox)


def _is_void(service: Any, request: Request, c: Coordinator, rules: Rules) -> bool:
    """Returns whether `request` can have no effect any more: tokens, epochs and versions never come back."""
    if rules.fencing_token and request.token < service.token:
        return request.method != "open" or request.token in service.tokens
    if rules.epoch_fence and request.method in _EPOCHS:
        is_join = request.method == "join"
        return request.about <= service.epoch if is_join else request.about[0] < service.epoch
    if rules.digest_in_commit and request.method == "commit":  # a session does not publish it again
        return request.token == c.token and request.about.version < c.version
    if rules.batch_id and rules.stamp_compared and request.method in ("train", "block", "apply"):
        return service.is_open and request.about.version < service.weights.version
    if request.method in _OF_EPISODES:
        return _is_of_no_episode(service, request)
    return request.method == "generate"


def _is_of_no_episode(e: Environment, request: Request) -> bool:
    """Returns whether the episode of a call that plays or ends it is not there, and no call that begins it arrives."""
    episode = request.about[0]
    begins = any(one.method == "reset" and one.about[0] == episode for one in e.inbox)
    return request.method != "reset" and not begins and all(one.episode != episode for one in e.sessions)


def _without_abandoned(e: Environment, c: Coordinator) -> Environment:
    """Forgets episodes that nobody plays and that no call plays on: their leases end them, whenever that is."""
    played = {c.episode, *(one.about[0] for one in e.inbox if one.method != "close")}
    return e._replace(sessions=frozenset(one for one in e.sessions if one.episode in played))


def _with_episodes(w: World) -> World:
    """Numbers episodes anew, and orders calls to the environment, which may arrive in any order."""
    e, c = w.environment, w.coordinator
    old = sorted({c.episode, *(one.episode for one in e.sessions), *(one.about[0] for one in e.inbox)} - {0})
    new = {0: 0} | {episode: number for number, episode in enumerate(old, 1)}

    def call(request: Request | None) -> Request | None:
        return request and request._replace(about=(new.get(request.about[0], 0), request.about[1]))

    e = e._replace(
        sessions=frozenset(one._replace(episode=new[one.episode]) for one in e.sessions),
        inbox=tuple(sorted(map(call, e.inbox))),  # type: ignore[type-var]
        waits=call(e.waits),
    )
    return w._replace(environment=e, coordinator=c._replace(episode=new[c.episode]))


def _renumbered(w: World) -> World:
    services = (w.trainer, w.environment, *w.replicas) if w.mode.turns else (w.trainer, *w.replicas)
    calls = [call for one in services for call in (*one.inbox, one.waits) if call]
    seats = [r.seat for r in w.replicas]
    tokens = {0, w.coordinator.token, *w.trainer.tokens, *(one.token for one in services)}
    tokens |= {call.token for call in calls} | ({w.trainer.copied.token} if w.trainer.copied else set())
    epochs = {0, w.coordinator.epoch, w.ledger.epoch, *seats, w.trainer.epoch, *(one.epoch for one in w.replicas)}
    epochs |= {_epoch_of(call) for call in calls}
    if len(tokens) == max(tokens) + 1 and len(epochs) == max(epochs) + 1:
        return w
    token = {old: new for new, old in enumerate(sorted(tokens))}
    epoch = {old: new for new, old in enumerate(sorted(epochs))}

    def call(request: Request | None) -> Request | None:
        if request is None:
            return None
        about = request.about
        if request.method == "join":
            about = epoch[about]
        elif request.method in _EPOCHS:
            about = epoch[about[0]], about[1]
        return Request(request.method, token[request.token], about)

    def service(one: Any, **more: object) -> Any:
        inbox = tuple(map(call, one.inbox))
        return one._replace(token=token[one.token], epoch=epoch[one.epoch], inbox=inbox, waits=call(one.waits), **more)

    def environment(one: Any) -> Any:
        inbox = tuple(map(call, one.inbox))
        return one._replace(token=token[one.token], inbox=inbox, waits=call(one.waits))

    copied = w.trainer.copied and w.trainer.copied._replace(token=token[w.trainer.copied.token])
    c = w.coordinator
    return w._replace(
        coordinator=c._replace(token=token[c.token], epoch=epoch[c.epoch]),
        trainer=service(w.trainer, copied=copied, tokens=frozenset(token[old] for old in w.trainer.tokens)),
        replicas=tuple(service(r, seat=epoch[r.seat]) for r in w.replicas),
        ledger=w.ledger._replace(epoch=epoch[w.ledger.epoch]),
        environment=environment(w.environment) if w.mode.turns else w.environment,
    )


def _epoch_of(call: Request) -> int:
    if call.method not in _EPOCHS:
        return 0
    return call.about if call.method == "join" else call.about[0]


def _with_new_salts(w: World) -> World:
    """Forgets weights that only the search remembers, and numbers the others of each version from 0 on."""
    remembered = set(_weights(w._replace(compared=frozenset(), updates=())))
    updates = tuple(update for update in w.updates if update.after in remembered)
    w = w._replace(compared=w.compared & remembered, updates=updates)
    names: dict[Weights, Weights] = {}
    for weights in sorted({*remembered, *_weights(updates)}):
        if weights.salt != CORRUPT:
            names[weights] = Weights(weights.version, sum(old.version == weights.version for old in names))
    return w if all(old == new for old, new in names.items()) else _renamed(w, names)


def _weights(value: Any) -> Iterator[Weights]:
    if isinstance(value, Weights):
        yield value
    elif isinstance(value, tuple | frozenset):
        for part in value:
            yield from _weights(part)


def _renamed(value: Any, names: Mapping[Weights, Weights]) -> Any:
    if isinstance(value, Weights):
        return names.get(value, value)
    if isinstance(value, frozenset):
        return frozenset(_renamed(part, names) for part in value)
    if not isinstance(value, tuple):
        return value
    parts = [_renamed(part, names) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
