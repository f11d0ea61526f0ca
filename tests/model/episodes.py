"""Models samples of several turns.

See services/coordinator/rl/sampling/episodes.py and services/reward/environments/servicer.py. A batch is one sample
here, whose turns are drawn one after the other. An episode that fails is played again.
"""

from collections.abc import Callable, Iterator

from tests.model.batches import next_to_draw
from tests.model.coordinator import drawing, ended, moved, must_draw, samples_came, synced
from tests.model.services import refusal
from tests.model.state import (
    Batch,
    Environment,
    Order,
    Request,
    Rules,
    Session,
    Transition,
    Weights,
    World,
    answered,
    is_lost,
    is_pending,
    sent,
    taken,
    with_replica,
)

# The coordinator


def can_open(w: World, rules: Rules) -> bool:
    is_wanted = w.mode.turns > 0 and w.environment.view == "dead"
    return is_wanted and w.coordinator.at not in ("down", "opening trainer", "done")


def open_environment(w: World, rules: Rules) -> Iterator[World]:
    """Opens the run in the environment, which ends the episodes of an earlier coordinator."""
    e, c = w.environment, w.coordinator
    sessions = e.sessions if e.token == c.token else frozenset()
    yield w._replace(environment=e._replace(is_open=True, token=c.token, view="open", sessions=sessions))


def must_begin(w: World, rules: Rules) -> bool:
    c = w.coordinator
    return w.mode.turns > 0 and c.episode == 0 and must_draw(w, rules) and w.environment.view == "open"


def begin(w: World, rules: Rules) -> Iterator[World]:
    """Begins an episode with an id that no other has."""
    e, c = w.environment, w.coordinator
    episode = 1 + max((one for one in episodes_of(e)), default=0)
    yield moved(w._replace(environment=sent(e, "reset", c.token, (episode, -1))), "resetting", episode=episode)


def episodes_of(e: Environment) -> set[int]:
    return {one.episode for one in e.sessions} | {one.about[0] for one in e.inbox}


def has_replied(place: str) -> Callable[[World, Rules], bool]:
    """Returns a guard that holds at `place` once the environment has answered the call."""

    def guard(w: World, rules: Rules) -> bool:
        answer = w.environment.answer
        return w.coordinator.at == place and answer is not None and answer.word == "reply"

    return guard


def take_reset(w: World, rules: Rules) -> Iterator[World]:
    yield moved(w._replace(environment=calm(w.environment)), "generating")


def has_turn(w: World, rules: Rules) -> bool:
    return w.mode.turns > 0 and samples_came(w, rules)


def step(w: World, rules: Rules) -> Iterator[World]:
    """Gives the environment the turn that was drawn."""
    (index, r), c = drawing(w), w.coordinator
    turns = (*c.turns, r.answer.value[0])
    w = with_replica(w, index, r._replace(waits=None, answer=None))
    environment = sent(w.environment, "step", c.token, (c.episode, len(c.turns)))
    yield moved(w._replace(environment=environment), "stepping", turns=turns)


def has_more(w: World, rules: Rules) -> bool:
    return has_replied("stepping")(w, rules) and len(w.coordinator.turns) < w.mode.turns


def is_over(w: World, rules: Rules) -> bool:
    return has_replied("stepping")(w, rules) and not has_more(w, rules)


def record_episode(w: World, rules: Rules) -> Iterator[World]:
    """Records the batch, and ends the episode without waiting until it has ended."""
    yield with_batch(w._replace(environment=calm(w.environment)), w.coordinator.turns, ends=True)


def with_batch(w: World, turns: tuple[Weights, ...], *, ends: bool) -> World:
    """Returns the world with the batch of these turns on disk; if `ends`, the open episode ends too."""
    batch = Batch(next_to_draw(w), turns[-1], w.coordinator.stamp, turns=turns)
    w = without_episode(w) if ends else w
    return moved(w._replace(ledger=synced(w.ledger, batch)), "recording", batch=batch)


def without_episode(w: World) -> World:
    """Returns the world with a call on its way that ends the episode."""
    e, c = w.environment, w.coordinator
    e = e._replace(inbox=(*e.inbox, Request("close", c.token, (c.episode, -1))))
    return w._replace(environment=e, coordinator=c._replace(episode=0, turns=()))


def is_left_over(w: World, rules: Rules) -> bool:
    """Returns whether the batch can do without the episode that has begun, as with selection.over_sampling."""
    c = w.coordinator
    has_begun = 0 < len(c.turns) < w.mode.turns
    return c.at == "generating" and has_begun and any(r.view == "serving" and r.stamp == c.stamp for r in w.replicas)


def leave_over(w: World, rules: Rules) -> Iterator[World]:
    """Records the batch of another sample, whose turns are not modeled one by one."""
    drawn = next(r.content for r in w.replicas if r.view == "serving" and r.stamp == w.coordinator.stamp)
    yield with_batch(w, (drawn,) * w.mode.turns, ends=rules.leftovers_dropped)


def has_failed(w: World, rules: Rules) -> bool:
    e = w.environment
    is_refused = e.answer is not None and e.answer.word == "refused"
    return w.coordinator.at in ("resetting", "stepping") and (is_lost(e) or is_refused)


def play_again(w: World, rules: Rules) -> Iterator[World]:
    """Begins the sample again, after opening a service that was lost; ends the run if it cannot be played again."""
    e = w.environment
    if e.answer and e.answer.value in ("replaced", "another turn"):
        yield ended(w)
        return
    view = e.view if e.is_open and e.token == w.coordinator.token else "dead"
    yield moved(without_episode(w._replace(environment=calm(e)._replace(view=view))), "generating")


def calm(e: Environment) -> Environment:
    return e._replace(waits=None, answer=None)


# The environment


def receives(method: str, act: Callable[[Environment, Rules, Request], Environment]) -> list[Transition]:
    """Returns the transitions in which the environment handles a call of `method`."""

    def handling(is_late: bool) -> Transition:
        def requests(w: World) -> set[Request]:
            e = w.environment
            return {one for one in e.inbox if one.method == method and (one != e.waits) == is_late}

        def guard(w: World, rules: Rules) -> bool:
            return bool(w.environment.inbox) and bool(requests(w))

        def effect(w: World, rules: Rules) -> Iterator[World]:
            e = w.environment
            for request in requests(w):
                why = refusal(e, request, rules)
                yield w._replace(environment=refused(e, request, why) if why else act(e, rules, request))

        name = f"the environment handles {'a late ' if is_late else ''}{method}"
        return Transition(name, guard, effect, order=Order.FREE if is_late else Order.CURRENT)

    return [handling(is_late=False), handling(is_late=True)]


def refused(e: Environment, request: Request, why: str) -> Environment:
    return answered(e, request, "refused", why)


def session_of(e: Environment, request: Request) -> Session | None:
    return next((one for one in e.sessions if one.episode == request.about[0]), None)


def reset(e: Environment, rules: Rules, request: Request) -> Environment:
    """Begins an episode; one that has already played turns begins again."""
    before, after = session_of(e, request), Session(request.about[0])
    return answered(e, request, "reply")._replace(sessions=e.sessions - {before} | {after})


def play(e: Environment, rules: Rules, request: Request) -> Environment:
    """Plays the next turn; a repeated call for the last turn is answered from memory."""
    session, turn = session_of(e, request), request.about[1]
    if session is None:
        return refused(e, request, "no episode")
    if turn == session.turn + 1:
        sessions = e.sessions - {session} | {session._replace(turn=turn)}
        return answered(e, request, "reply")._replace(sessions=sessions)
    if turn == session.turn and rules.steps_remembered:
        return answered(e, request, "reply")
    if turn != session.turn and rules.steps_numbered:
        return refused(e, request, "another turn")
    return answered(e, request, "reply")._replace(has_acted_twice=True)


def close(e: Environment, rules: Rules, request: Request) -> Environment:
    return taken(e, request)._replace(sessions=e.sessions - {session_of(e, request)})


def is_abandoned(w: World, rules: Rules) -> bool:
    return rules.episodes_leased and w.coordinator.at == "done" and bool(w.environment.sessions)


def end_leases(w: World, rules: Rules) -> Iterator[World]:
    """Ends the episodes that nobody plays. The time makes no difference to others, so it is the end of the run.

    If the lease of an episode ends while it is played, that is the same as the death of its process: `kill_worker`.
    """
    yield w._replace(environment=w.environment._replace(sessions=frozenset()))


# What can go wrong


def is_open(w: World, rules: Rules) -> bool:
    return w.environment.is_open


def kill_service(w: World, rules: Rules) -> Iterator[World]:
    e = w.environment
    dead = Environment(has_acted_twice=e.has_acted_twice, view=e.view, waits=e.waits, answer=e.answer)
    yield w._replace(environment=dead)


def has_sessions(w: World, rules: Rules) -> bool:
    return bool(w.environment.sessions)


def kill_worker(w: World, rules: Rules) -> Iterator[World]:
    """Ends the process that plays the episodes, which died or took too long; the service goes on."""
    yield w._replace(environment=w.environment._replace(sessions=frozenset()))


def calls(w: World, rules: Rules) -> bool:
    e = w.environment
    return w.coordinator.at in ("resetting", "stepping") and (is_pending(e) or e.answer is not None)


def lose_call(w: World, rules: Rules) -> Iterator[World]:
    """Loses a call, which the connection repeats or the caller gives up; the lost one may still arrive."""
    e = w.environment
    yield w._replace(environment=e._replace(inbox=(*e.inbox, e.waits), answer=None))
    yield moved(without_episode(w._replace(environment=calm(e))), "generating")


def closes(w: World, rules: Rules) -> bool:
    return any(one.method == "close" for one in w.environment.inbox)


def lose_close(w: World, rules: Rules) -> Iterator[World]:
    e = w.environment
    yield w._replace(environment=e._replace(inbox=tuple(one for one in e.inbox if one.method != "close")))
