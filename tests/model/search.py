"""Searches all states that the protocol can reach, breadth first, so that the first violation has the shortest path."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tests.model.properties import INVARIANTS, is_finished
from tests.model.state import Request, Rules, Transition, World

PROGRESS = "once faults stop, the run can reach its end"
ALL_RULES = Rules()


class Found(NamedTuple):
    """The result of a search."""

    num_states: int
    num_finished: int
    seconds: float
    violated: str
    """The property that does not hold; empty if all hold."""
    path: Sequence[str]
    """Names of the transitions that lead to the violation."""


def after(
    world: World, protocol: Sequence[Transition], rules: Rules, max_faults: int
) -> Iterator[tuple[Transition, World]]:
    """Yields every transition that can happen in `world`, with the state that it leads to."""
    for step in protocol:
        if step.is_fault and world.num_faults == max_faults:
            continue
        if step.guard(world, rules):
            for then in step.effect(world, rules):
                yield step, _canonical(then, world.num_faults + step.is_fault, rules)


def search(protocol: Sequence[Transition], rules: Rules = ALL_RULES, *, max_faults: int) -> Found:
    """Visits every reachable state with at most `max_faults` faults on its path; stops at the first violation."""
    begin = time.perf_counter()
    first = World()
    reached: dict[World, tuple[World | None, str]] = {first: (None, "")}
    calmly_before: dict[World, list[World]] = {}
    finished: list[World] = []
    waiting = deque([first])
    violated, where = "", None
    while waiting and not violated:
        world = waiting.popleft()
        violated = next((name for name, holds in INVARIANTS.items() if not holds(world)), "")
        where = world
        if is_finished(world):
            finished.append(world)
        for step, then in after(world, protocol, rules, max_faults):
            if then not in reached:
                reached[then] = world, step.name
                waiting.append(then)
            if not step.is_fault:
                calmly_before.setdefault(then, []).append(world)
    if not violated and (where := _first_stuck(reached, finished, calmly_before)):
        violated = PROGRESS
    path = _path(reached, where) if violated and where else []
    return Found(len(reached), len(finished), time.perf_counter() - begin, violated, path)


def _canonical(world: World, num_faults: int, rules: Rules) -> World:
    """Orders the replicas, which are interchangeable, and forgets calls that would be refused whenever they arrive."""
    one, other = (_purged(replica, rules) for replica in world.replicas)
    replicas = (other, one) if hash(other) < hash(one) else (one, other)
    return world._replace(trainer=_purged(world.trainer, rules), replicas=replicas, num_faults=num_faults)


def _purged(service: Any, rules: Rules) -> Any:
    if not service.inbox:
        return service
    inbox = tuple(one for one in service.inbox if one == service.waits or not _is_void(service, one, rules))
    return service if len(inbox) == len(service.inbox) else service._replace(inbox=inbox)


def _is_void(service: Any, request: Request, rules: Rules) -> bool:
    """Returns whether `request` can have no effect any more: tokens, epochs and versions never come back."""
    if rules.fencing_token and request.token < service.token and request.method != "open":
        return True
    if rules.epoch_fence and request.method in ("join", "send", "receive"):
        is_join = request.method == "join"
        epoch = request.about if is_join else request.about[0]
        return epoch <= service.epoch if is_join else epoch < service.epoch
    return request.method == "generate"


def _first_stuck(
    reached: dict[World, tuple[World | None, str]], finished: list[World], calmly_before: dict[World, list[World]]
) -> World | None:
    """Returns the first state from which no finished state can be reached without another fault."""
    good, waiting = set(finished), list(finished)
    while waiting:
        for before in calmly_before.get(waiting.pop(), ()):
            if before not in good:
                good.add(before)
                waiting.append(before)
    return next((world for world in reached if world not in good), None)


def _path(reached: dict[World, tuple[World | None, str]], world: World) -> list[str]:
    path = []
    before, name = reached[world]
    while before is not None:
        path.append(name)
        before, name = reached[before]
    return path[::-1]
