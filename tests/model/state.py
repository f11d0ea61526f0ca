"""The state of the protocol's model: what every process holds, what is on disk and which calls are under way.

All values are immutable and hashable, because the search keeps every state that it has seen.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

NUM_STEPS = 2
NUM_REPLICAS = 2
MAX_ATTEMPTS = 3  # of one publication, as in services/coordinator/rl/publishing.py
CORRUPT = -1


class Weights(NamedTuple):
    """Content of the weights. It stands for the digest too: equal contents have equal digests, others have not."""

    version: int
    salt: int
    """How often this version was trained before: an update that is repeated need not give the same weights."""


class Batch(NamedTuple):
    """A batch of samples. Its id is its version, as in `Run.batch_id`."""

    version: int
    drawn: Weights
    """The weights that the samples were really drawn from."""
    stamp: Weights
    """The stamp that the samples carry."""
    is_foreign: bool = False
    """Whether it is only in the memory of a coordinator that was replaced."""
    turns: tuple["Weights", ...] = ()
    """In a run with an environment, what the turns of its sample were really drawn from."""


class Request(NamedTuple):
    """A call on its way to a service. It may arrive late, or when its caller is gone."""

    method: str
    token: int
    about: Any = None


class Answer(NamedTuple):
    """An answer on its way to the coordinator."""

    word: str
    value: Any = None


class Update(NamedTuple):
    """An update of the trainer that really happened."""

    before: Weights
    batch: Batch
    after: Weights
    is_owners: bool
    """Whether the coordinator that opened the run last asked for it."""
    is_pure: bool = True
    """Whether it applied the gradients of this batch and of nothing else."""


class Checkpoint(NamedTuple):
    """A checkpoint of step `step`."""

    step: int
    weights: Weights
    last: Batch
    token: int = 0
    """Of the coordinator that asked for it, while it is written."""
    kept: tuple[Weights, ...] = ()
    """As the trainer's."""


class Coordinator(NamedTuple):
    """The coordinator's memory. After it was killed, only its token counts on."""

    at: str = "down"
    """What it does: down, opening trainer, opening replicas, begun, publishing, joining, sending, committing, finishing
    step, saving, generating, collecting, streaming, recording, sleeping, training, ending, done.
    """
    token: int = 0
    version: int = 0
    stamp: Weights | None = None
    batch: Batch | None = None
    epoch: int = 0
    """Of its weight group; 0 if there is none."""
    attempts: int = 0
    saving: int = 0
    """The version of the checkpoint that is being saved; 0 if there is none."""
    is_ahead: bool = False
    """Whether the trainer has applied a step that the ledger has not."""
    streamed: Batch | None = None
    """What it has sent in the stream of blocks that is open."""
    episode: int = 0
    """The id of the episode that it plays; 0 if there is none."""
    turns: tuple[Weights, ...] = ()
    """What the turns of this episode were drawn from."""


class Trainer(NamedTuple):
    """The trainer. Its ranks are one process here, as each command ends on all ranks or ends the trainer."""

    is_open: bool = False
    token: int = 0
    tokens: frozenset[int] = frozenset()
    """All that were accepted once."""
    weights: Weights | None = None
    last: Batch | None = None
    """The batch that was applied last."""
    is_published: bool = False
    """Whether it knows the digest of its weights."""
    kept: tuple[Weights, ...] = ()
    """With a lag k, the stamps of the last k + 1 versions that were published."""
    epoch: int = 0
    stage: str = ""
    """Its part in the weight group: joining, joined, sending or none."""
    copied: Checkpoint | None = None
    """What it writes in the background."""
    arrived: Batch | None = None
    """The blocks of the stream that is open."""
    gradients: tuple[Batch, ...] = ()
    """What the gradients on its ranks are of, which are not applied yet."""
    inbox: tuple[Request, ...] = ()
    waits: Request | None = None
    """The call whose answer the coordinator waits for."""
    answer: Answer | None = None
    saved: Answer | None = None


class Replica(NamedTuple):
    """A rollout replica, and what the coordinator knows of it."""

    is_open: bool = False
    token: int = 0
    content: Weights | None = None
    """The weights that its engine really has."""
    stamp: Weights | None = None
    """The stamp that it serves."""
    received: Weights | None = None
    """The stamp that it has received and that is not committed."""
    newest: int = -1
    """The newest version that it has served in this session."""
    is_asleep: bool = False
    """Whether its engine has no memory."""
    epoch: int = 0
    stage: str = ""
    """Its part in the weight group: joining, joined, receiving or none."""
    seat: int = 0
    """The epoch for which the coordinator counts on it."""
    view: str = "dead"
    """What the coordinator takes it for: dead, stale or serving."""
    inbox: tuple[Request, ...] = ()
    waits: Request | None = None
    answer: Answer | None = None


class Session(NamedTuple):
    """An episode in an environment."""

    episode: int
    turn: int = -1
    """The last turn that it has played."""


class Environment(NamedTuple):
    """The environment in its service, and what the coordinator knows of it."""

    is_open: bool = False
    token: int = 0
    sessions: frozenset[Session] = frozenset()
    has_acted_twice: bool = False
    """Whether a turn of an episode has had two effects."""
    stage: str = ""
    view: str = "dead"
    """What the coordinator takes it for: dead or open."""
    inbox: tuple[Request, ...] = ()
    waits: Request | None = None
    answer: Answer | None = None


class Ledger(NamedTuple):
    """The rows that are on disk."""

    epoch: int = 0
    last: int = 0
    """The version of the newest BEGUN or FINISHED row."""
    collected: tuple[Batch | None, ...] = (None,) * NUM_STEPS
    unsynced: Batch | None = None
    """A COLLECTED row that is not on disk yet."""
    finished: tuple[tuple[Batch | None, Weights | None] | None, ...] = (None,) * (NUM_STEPS + 1)
    """Of every finished step the recorded batch and the published weights."""
    saved: int = 0


class Mode(NamedTuple):
    """How the run is configured. Each search has one mode."""

    streams: bool = False
    """Blocks of a batch are sent before the batch is complete (trainer.streaming)."""
    sleeps: bool = False
    """Replicas sleep while the trainer works (placement colocated)."""
    lag: int = 0
    """trainer.lag.versions"""
    turns: int = 0
    """Number of turns of an episode; 0 without an environment."""


class World(NamedTuple):
    """A state of the whole system."""

    coordinator: Coordinator = Coordinator()
    trainer: Trainer = Trainer()
    replicas: tuple[Replica, ...] = (Replica(),) * NUM_REPLICAS
    ledger: Ledger = Ledger()
    disk: tuple[Checkpoint | None, ...] = (None,) * (NUM_STEPS + 1)
    compared: frozenset[Weights] = frozenset()
    """Stamps that the coordinator found equal on all members."""
    updates: tuple[Update, ...] = ()
    num_faults: int = 0
    mode: Mode = Mode()
    environment: Environment = Environment()

    @property
    def num_steps(self) -> int:
        """Returns the number of steps of the run."""
        return len(self.ledger.collected)


class Rules(NamedTuple):
    """The protocol's rules. A mutation of the protocol leaves one out."""

    second_phase: bool = True
    """A replica serves what it received only when the coordinator commits it."""
    epoch_fence: bool = True
    """Members refuse calls of another epoch than their newest."""
    fencing_token: bool = True
    """Services refuse calls of all coordinators but the last one that opened the run."""
    batch_id: bool = True
    """The trainer answers a batch that it has applied from memory."""
    contents_compared: bool = True
    """It does so only if the samples are the same too."""
    digests_compared: bool = True
    """The coordinator commits only what has one digest on all members."""
    digest_in_commit: bool = True
    """A replica commits only the digest that it received."""
    stamp_of_draw: bool = True
    """A sample keeps the stamp that it was drawn from."""
    stamp_compared: bool = True
    """The trainer compares the stamp of the samples with its own."""
    synced_rows: bool = True
    """The batch is on disk before it is sent to the trainer."""
    versioned_save: bool = True
    """A request to save names the version."""
    leftovers_removed: bool = True
    """An unrecorded checkpoint of a step is removed before the step is saved again."""
    commit_awaited: bool = True
    """The trainer applies blocks only when their batch is committed."""
    blocks_begin_anew: bool = True
    """A stream of blocks drops the gradients of one that was broken."""
    blocks_compared: bool = True
    """The trainer applies blocks only if they are those of the committed batch."""
    sleep_ends_serving: bool = True
    """A replica that sleeps serves nothing until other weights are committed."""
    lag_drained: bool = True
    """A version is published after all that is drawn from the one before it."""
    leftovers_dropped: bool = True
    """An episode that a batch does not need is ended, and not played on after the next publication."""
    steps_remembered: bool = True
    """An environment answers the turn that it has played last from memory."""
    steps_numbered: bool = True
    """An environment plays only the turn after its last one."""
    episodes_leased: bool = True
    """An environment ends an episode that nobody plays any more."""


def world_of(mode: Mode, num_steps: int = NUM_STEPS) -> World:
    """Returns the first state of a run."""
    ledger = Ledger(collected=(None,) * num_steps, finished=(None,) * (num_steps + 1))
    return World(ledger=ledger, disk=(None,) * (num_steps + 1), mode=mode)


Guard = Callable[[World, Rules], bool]
Effect = Callable[[World, Rules], Iterable[World]]


class Order(IntEnum):
    """How far the search permutes a transition with others. See `after` in search.py."""

    LOCAL = 0
    """Concerns only the coordinator: it takes answers that are there, and sends calls."""
    CURRENT = 1
    """A service handles the call that the coordinator waits for."""
    FREE = 2


class Transition(NamedTuple):
    """One thing that can happen: when it can, and which states it can lead to."""

    name: str
    guard: Guard
    effect: Effect
    emits: tuple[str, ...] = ()
    """What can be seen of the coordinator: the calls that it sends, and the kinds of the rows that it writes."""
    is_fault: bool = False
    order: Order = Order.FREE


def for_each_replica(name: str, guard: Any, effect: Any, **more: Any) -> list[Transition]:
    """Returns the transition of each replica. Guard and effect take its index too."""
    return [
        Transition(name, partial(_of, guard, index), partial(_of, effect, index), **more)
        for index in range(NUM_REPLICAS)
    ]


def _of(function: Any, index: int, world: World, rules: Rules) -> Any:
    return function(world, rules, index)


def sent(service: Any, method: str, token: int, about: Any = None) -> Any:
    """Returns the service with a call on its way, whose answer the coordinator waits for."""
    request = Request(method, token, about)
    return service._replace(inbox=(*service.inbox, request), waits=request, answer=None)


def taken(service: Any, request: Request) -> Any:
    """Returns the service without `request`, which it answers later."""
    inbox = list(service.inbox)
    inbox.remove(request)
    return service._replace(inbox=tuple(inbox))


def answered(service: Any, request: Request, word: str, value: Any = None) -> Any:
    """Returns the service without `request`, and with its answer if somebody waits for it."""
    answer = Answer(word, value) if service.waits == request else service.answer
    return taken(service, request)._replace(answer=answer)


def with_replica(world: World, index: int, replica: Replica) -> World:
    """Returns the world with another replica at `index`."""
    replicas = list(world.replicas)
    replicas[index] = replica
    return world._replace(replicas=tuple(replicas))


def is_pending(service: Any) -> bool:
    """Returns whether the call that the coordinator waits for can still be answered by the service."""
    if service.waits is None or service.answer is not None:
        return False
    return service.waits in service.inbox or service.stage in ("joining", "sending", "receiving")


def is_lost(service: Any) -> bool:
    """Returns whether the service was restarted since, so that its answer never comes."""
    return service.waits is not None and service.answer is None and not is_pending(service)
