"""Searches all states that the protocol can reach, breadth first, so that the first violation has the shortest path."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tests.model.canonical import canonical
from tests.model.properties import INVARIANTS, is_finished
from tests.model.state import Order, Rules, Transition, World, is_lost

PROGRESS = "once faults stop, the run can reach its end"
ALL_RULES = Rules()
FIRST = World()


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
    world: World, protocol: Sequence[Transition], rules: Rules = ALL_RULES, *, max_faults: int, permuting: bool = True
) -> Iterator[tuple[Transition, World]]:
    """Yields the transitions that can happen in `world`, with the states that they lead to.

    Without `permuting`, what happens in different places at the same time happens in one order only. A LOCAL transition
    comes before all others: until it, the rest of the system sees no difference. Of the services that can handle their
    CURRENT call, only the first does, and faults come before all of them. Nothing is lost: a fault leaves the calls
    under way, so that they can be handled after it as well.
    """
    is_current_done = False
    allows_faults = permuting or not any(map(_is_handled, (world.trainer, world.environment, *world.replicas)))
    for step in protocol:
        if step.is_fault and (world.num_faults == max_faults or (step.order is Order.FREE and not allows_faults)):
            continue
        if step.order is Order.CURRENT and is_current_done:
            continue
        if not step.guard(world, rules):
            continue
        for then in step.effect(world, rules):
            yield step, canonical(then._replace(num_faults=world.num_faults + step.is_fault), rules)
        if not permuting:
            if step.order is Order.LOCAL:
                return
            is_current_done = is_current_done or (step.order is Order.CURRENT and not step.is_fault)


def _is_handled(service: Any) -> bool:
    """Returns whether the service has handled the call that the coordinator waits for."""
    return service.waits is not None and service.waits not in service.inbox and not is_lost(service)


def search(
    protocol: Sequence[Transition],
    rules: Rules = ALL_RULES,
    *,
    max_faults: int,
    permuting: bool = False,
    first: World = FIRST,
) -> Found:
    """Visits every state that can be reached from `first` with at most `max_faults` faults; stops at a violation."""
    begin = time.perf_counter()
    protocol = sorted(protocol, key=lambda step: step.order)
    worlds, numbers = [first], {first: 0}
    came_from: list[tuple[int, str]] = [(0, "")]
    calmly_before: list[list[int]] = [[]]
    finished: list[int] = []
    violated, at = "", 0
    while at < len(worlds):
        world = worlds[at]
        if violated := next((name for name, holds in INVARIANTS.items() if not holds(world)), ""):
            break
        if is_finished(world):
            finished.append(at)
        for step, then in after(world, protocol, rules, max_faults=max_faults, permuting=permuting):
            number = numbers.setdefault(then, len(worlds))
            if number == len(worlds):
                worlds.append(then)
                came_from.append((at, step.name))
                calmly_before.append([])
            if not step.is_fault:
                calmly_before[number].append(at)
        at += 1
    if not violated and (at := _first_stuck(finished, calmly_before)) is not None:
        violated = PROGRESS
    path = _path(came_from, at) if violated and at is not None else []
    return Found(len(worlds), len(finished), time.perf_counter() - begin, violated, path)


def _first_stuck(finished: list[int], calmly_before: list[list[int]]) -> int | None:
    """Returns the first state from which no finished state can be reached without another fault."""
    is_good, waiting = bytearray(len(calmly_before)), list(finished)
    for number in finished:
        is_good[number] = True
    while waiting:
        for before in calmly_before[waiting.pop()]:
            if not is_good[before]:
                is_good[before] = True
                waiting.append(before)
    stuck = is_good.find(0)
    return None if stuck < 0 else stuck


def _path(came_from: list[tuple[int, str]], at: int) -> list[str]:
    path = []
    while at:
        at, name = came_from[at]
        path.append(name)
    return path[::-1]
