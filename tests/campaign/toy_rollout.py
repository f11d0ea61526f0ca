"""A replica: the real servicer, around an engine that is a small process of its own. Imports no vLLM."""

import asyncio
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import Any

from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.types.v1.types_pb2 import FINISH_REASON_STOP, Completion, DeviceMemory, SamplingParams, WeightGroup

from services.common.errors import PreconditionFailed, Reason, Unavailable
from services.common.rpc.command import ServeOptions
from services.common.rpc.server import Server
from services.common.weights.store import StoreAddress, StoreClient
from tests.campaign.policy import name_of

WEIGHTS, KV_CACHE = "weights", "kv_cache"


@dataclass(frozen=True)
class Needs:
    adapter_rank: int = 0
    can_sleep: bool = False
    routed_experts: None = None


@dataclass(frozen=True)
class Sample:
    completion: Completion
    prompt_tokens: Sequence[int]
    num_cached_tokens: int
    drafts: rollout_pb2.Drafts = field(default_factory=rollout_pb2.Drafts)
    routed_experts: bytes = b""
    sampling_mask: bytes = b""


class Receiver:
    """Names of the methods of an engine's workers."""

    def lockstep_join(self) -> None: ...

    def lockstep_receive(self) -> None: ...


class ToyEngine:
    """As services/rollout/engine.py: Engine, as far as the servicer knows it."""

    def __init__(self, process: asyncio.subprocess.Process, on_death: Callable[[], None]):
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._group, self._rank = WeightGroup(), 0
        self._store: StoreClient | None = None
        self._reading = asyncio.create_task(self._read(on_death))
        self.asleep: frozenset[str] = frozenset()
        self.num_workers = 1
        self.routed_experts = None

    @property
    def samples_in_flight(self) -> int:
        return len(self._waiting)

    @classmethod
    async def start(cls, config: Any, card: Any, seed: int, on_death: Callable[[], None], needs: Needs) -> "ToyEngine":
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.campaign.toy_engine", stdin=-1, stdout=-1, start_new_session=False
        )
        return cls(process, on_death)

    async def _read(self, on_death: Callable[[], None]) -> None:
        assert self._process.stdout
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            waiting = self._waiting.pop(answer["id"], None)
            if waiting and not waiting.done():
                waiting.set_result(answer)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Unavailable("the engine died", reason=Reason.ENGINE_DEAD))
        on_death()

    async def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(json.dumps({"id": number, **question}).encode() + b"\n")
            return await waiting
        except ConnectionError as error:
            raise Unavailable("the engine died", reason=Reason.ENGINE_DEAD) from error
        finally:
            self._waiting.pop(number, None)

    def unfinished(self) -> dict[str, int]:
        return {}

    async def sample(self, prompt_tokens: Sequence[int], seed: int, sampling: SamplingParams, prompt_id: str) -> Sample:
        answer = await self._ask(prompt=list(prompt_tokens), seed=seed)
        completion = Completion(
            tokens=answer["tokens"], logprobs=answer["logprobs"], finish_reason=FINISH_REASON_STOP, seed=seed
        )
        return Sample(completion, prompt_tokens, 0)

    async def call_workers(self, method: Callable[..., Any], *arguments: Any) -> list[dict[str, Any]]:
        try:
            if method is Receiver.lockstep_join:
                return [await self._join(*arguments)]
            return [await self._receive(*arguments)]
        except (RuntimeError, OSError) as error:  # of torch's store
            return [{"error": f"{type(error).__name__}: {error}"}]

    async def _join(self, group: bytes, plan: bytes, rank: int) -> dict[str, Any]:
        self._group, self._rank = WeightGroup.FromString(group), rank
        await asyncio.to_thread(self._enter)
        return {"plan_digest": "plan"}

    def _enter(self) -> None:
        group = self._group
        if self._store:
            self._store.leave()
        self._store = StoreClient(StoreAddress(group.store_host, group.store_port, group.store_secret), group.timeout_s)
        name = name_of(group)
        self._store.set(f"{name} joined {self._rank}", b"here")
        self._store.wait([f"{name} trainer"], timedelta(seconds=group.timeout_s))

    async def _receive(self, version: int) -> dict[str, Any]:
        store, name, timeout = self._store, name_of(self._group), timedelta(seconds=self._group.timeout_s)
        if store is None:
            return {"error": "no group was joined"}

        def fetch() -> bytes:
            store.wait([f"{name} weights {version}"], timeout)
            return store.get(f"{name} weights {version}")

        weights = await asyncio.to_thread(fetch)
        received = await self._ask(weights=weights.hex())
        await asyncio.to_thread(store.set, f"{name} received {version} {self._rank}", b"yes")
        times = {"duration_s": 0.0, "wait_s": 0.0, "cost": {"digest_s": 0.0, "extra_bytes": 0}}
        return {"digest": received["digest"], "quantized_digest": "", "num_bytes": 32, **times}

    async def sleep(self) -> list[DeviceMemory]:
        if self._waiting:
            raise PreconditionFailed("the engine has samples")
        self.asleep = frozenset((WEIGHTS, KV_CACHE))
        return [DeviceMemory()]

    async def wake(self, part: str) -> list[DeviceMemory]:
        self.asleep -= {part}
        return [DeviceMemory()]

    async def pause(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(PreconditionFailed("aborted", reason=Reason.NOT_SERVING))

    async def resume(self) -> None:
        pass

    async def close(self) -> None:
        self._reading.cancel()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        if self._store:
            self._store.leave()


def replace_engine() -> None:
    """Puts the toy in the place of the modules that import vLLM; before services.rollout.servicer is imported."""
    replaced = {
        "services.rollout.arguments": {"Needs": Needs},
        "services.rollout.engine": {"Engine": ToyEngine, "Sample": Sample},
        "services.rollout.compat.worker": {"WEIGHTS": WEIGHTS, "KV_CACHE": KV_CACHE},
        "services.rollout.receiver": {"WeightReceiver": Receiver},
    }
    for name, content in replaced.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)


async def serve(options: ServeOptions) -> int:
    """Serves until a signal arrives or the engine dies."""
    from services.rollout.servicer import NAME, RolloutServicer

    server = Server()
    servicer = RolloutServicer(server.fail)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server.grpc)
    await server.start(options.listen, [NAME])
    code = await server.serve(grace_s=0.5)
    await servicer.close()
    return code
