"""Receives publications in an engine worker: a mixin that vLLM adds to its Worker class (worker_extension_cls).

All attributes have the prefix `lockstep`, because vLLM refuses a mixin whose attributes collide with the Worker's. The
code runs inside the engine's processes; calls arrive through `collective_rpc`, with plain values only.
"""

import itertools
import time
from typing import TypedDict

from lockstep.types.v1 import types_pb2

from services.common.errors import InternalError, LockstepError
from services.common.weights.buckets import Cost, unpack
from services.common.weights.digest import WeightDigest
from services.common.weights.group import WeightGroup
from services.common.weights.pairs.ends import PairReceiver
from services.common.weights.pairs.link import BACKEND as PAIRS
from services.common.weights.plan import Plan
from services.rollout.compat.vllm.kept import record_kept
from services.rollout.compat.vllm.routes import record_routes
from services.rollout.compat.vllm.worker import model_of, rank_of, weight_loading
from services.rollout.weights.adapter import load_adapter
from services.rollout.weights.loading import Arrivals, Loading
from services.rollout.weights.sleeping import ReceivingMember, SleepingWorker


class Failed(TypedDict):
    """Answers for a worker that failed. `absent` is as in WeightGroup's errors, empty if no absent member is known."""

    error: str
    absent: str


class Joined(TypedDict):
    """Answers for a worker that has joined the epoch."""

    plan_digest: str


class Received(TypedDict):
    """Answers for a worker that has received a publication. Fields are as in rollout.v1.ReceiveWeightsResponse."""

    digest: str
    num_bytes: int
    duration_s: float
    wait_s: float
    digest_s: float
    extra_bytes: int


class WeightReceiver(SleepingWorker):
    """Joins an epoch, and receives, loads and hashes weights."""

    def lockstep_record_routes(self) -> None:
        """Begins to record routes, if the engine was started to return them."""
        record_routes(self)

    def lockstep_record_kept(self) -> bool:
        """Begins to record kept sets. Returns whether this worker can."""
        return record_kept(self)

    def lockstep_join(self, group: bytes, plan: bytes, base_rank: int) -> Joined | Failed:
        """Joins the epoch; returns the plan's digest as computed here, or the error."""
        self.lockstep_leave()
        try:
            self._lockstep_set_plan(plan)
            message = types_pb2.WeightGroup.FromString(group)
            member = PairReceiver if message.backend == PAIRS else WeightGroup
            self._lockstep_group = member(message, rank=base_rank + rank_of(self), device=self.device)
        except LockstepError as error:
            return {"error": error.message, "absent": error.metadata.get("absent", "")}
        return {"plan_digest": self._lockstep_plan.digest}

    def lockstep_receive(self, version: int) -> Received | Failed:
        """Receives one publication into the live model; returns its digest, or the error.

        Errors are returned, not raised, because vLLM would report the first failing worker only.
        """
        loading, group, begin = self._lockstep_loading, self._lockstep_joined_group(), time.perf_counter()
        plan, timing, cost = self._lockstep_plan, {"wait_s": 0.0}, Cost(self.device)
        try:
            skips_base = self._lockstep_skips_base()
            digest = WeightDigest(plan.digest, self.device, self._lockstep_base_sums if skips_base else (0, 0))
            arrivals = self._lockstep_arrivals(plan.first_bucket(skips_base=skips_base), digest, timing, cost)
            if not skips_base:
                self._lockstep_base_sums = (0, 0)  # from here on the base may be partly overwritten
                self._lockstep_load_base(itertools.islice(arrivals, plan.num_base_buckets))
            if plan.has_adapter:
                self._lockstep_base_sums = digest.sums()
                self._lockstep_load_adapter(arrivals)
            if next(arrivals, None) is not None:  # the last bucket ends only when another one is asked for
                raise InternalError("more buckets arrived than the plan has")
            content = digest.hexdigest()
            group.acknowledge(version, content)
        except Exception as error:  # noqa: BLE001 the engine must stay reloadable after any error
            loading.abort()
            group.kill()
            self.lockstep_leave()
            return {"error": f"{type(error).__name__}: {error}", "absent": ""}
        num_bytes, duration_s = plan.num_bytes_sent(skips_base=skips_base), time.perf_counter() - begin
        spent = cost.measured()
        return {
            "digest": content,
            "num_bytes": num_bytes,
            "duration_s": duration_s,
            "wait_s": timing["wait_s"],
            "digest_s": spent["digest_s"],
            "extra_bytes": int(spent["extra_bytes"]),
        }

    def lockstep_leave(self) -> None:
        """Leaves the epoch, if one was joined."""
        group, self._lockstep_group = self._lockstep_group, None
        if group is not None:
            self._lockstep_loading.forget_buffers()
            group.abort()

    def _lockstep_set_plan(self, message: bytes) -> None:
        """Sets the plan. What was learned about the engine's memory is kept as long as the plan is the same."""
        if self._lockstep_plan_message != message:
            self._lockstep_plan = Plan(types_pb2.WeightPlan.FromString(message))
            self._lockstep_loading = Loading(model_of(self), self.model_config, self._lockstep_plan, self.device)
            self._lockstep_plan_message, self._lockstep_base_sums = message, (0, 0)

    def _lockstep_joined_group(self) -> ReceivingMember:
        assert self._lockstep_group is not None, "the servicer lets workers join before they receive"
        return self._lockstep_group

    def _lockstep_skips_base(self) -> bool:
        """Returns whether all members have the same base, so that it is not sent again. The senders decide likewise."""
        if not self._lockstep_plan.has_adapter:
            return False
        agrees = self._lockstep_joined_group().agrees(self._lockstep_base_sums)
        return agrees and self._lockstep_base_sums != (0, 0)

    def _lockstep_load_base(self, arrivals: Arrivals) -> None:
        with weight_loading(self):
            self._lockstep_loading.load(arrivals)
        if next(arrivals, None) is not None:
            raise InternalError("vLLM did not read all weights that were sent")

    def _lockstep_load_adapter(self, arrivals: Arrivals) -> None:
        tensors = {
            name: tensor.to("cpu", copy=True)  # the bucket's memory may be reused
            for _, bucket, flat in arrivals
            for name, tensor in unpack(bucket, flat)
        }
        load_adapter(self.add_lora, self._lockstep_plan.message.adapter_config_json, tensors)

    def _lockstep_arrivals(self, first: int, digest: WeightDigest, timing: dict[str, float], cost: Cost) -> Arrivals:
        buckets = self._lockstep_plan.buckets[first:]
        arriving = self._lockstep_joined_group().receive(buckets, in_place=self._lockstep_loading.reads_in_place)
        for index in itertools.count(first):
            begin = time.perf_counter()
            arrived = next(arriving, None)
            timing["wait_s"] += time.perf_counter() - begin
            if arrived is None:
                return
            bucket, flat = arrived
            with cost.hashing():
                digest.update(flat, start=bucket.start)
            yield index, bucket, flat
