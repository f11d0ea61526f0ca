"""Receives publications and sleeps in an engine worker: a mixin that vLLM adds to its Worker (worker_extension_cls).

All attributes have the prefix `lockstep`, because vLLM refuses a mixin whose attributes collide with the Worker's. The
code runs inside the engine's processes; calls arrive through `collective_rpc`, with plain values only.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import torch
from lockstep.types.v1 import types_pb2
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from services.common.errors import InternalError, LockstepError
from services.common.json_values import JsonObject
from services.common.memory import DeviceState, device_state
from services.common.weights.buckets import Cost, WeightDigest, unpack
from services.common.weights.group import WeightGroup
from services.common.weights.pairs import PAIRS, PairReceiver
from services.common.weights.plan import Plan
from services.rollout.compat import worker
from services.rollout.compat.recorded import record_experts, record_masks
from services.rollout.loading import Arrivals, Loading

ReceivingMember = WeightGroup | PairReceiver


class Fit(TypedDict):
    """The bytes that a part needs, and those that are free on the device."""

    device_uuid: str
    needed_bytes: int
    free_bytes: int


def _zeros(plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields zeros instead of all weights of the plan but adapters."""
    specs = plan.message.tensors[: plan.message.num_base_tensors if plan.has_adapter else None]
    for spec in specs:
        yield spec.name, torch.zeros(tuple(spec.shape), dtype=getattr(torch, spec.dtype))


def adapter_request(path: str, *, load_inplace: bool = False) -> LoRARequest:
    """Returns vLLM's request for the policy's only adapter. `path` matters only for loading it."""
    return LoRARequest("policy", 1, path, load_inplace=load_inplace)


class WeightReceiver(worker.WorkerExtension):
    """Joins an epoch; receives, loads and hashes weights; prepares for sleep, and reports memory.

    vLLM's own sleep and wake_up free and take the memory on GPU. On CPU they do nothing. There the weights are
    overwritten with zeros, so that an engine that served them would be noticed, and the KV cache stays.
    """

    _lockstep_group: ReceivingMember | None = None
    _lockstep_plan_message = b""  # empty until a weight group was joined; the other attributes are set with it
    _lockstep_plan: Plan
    _lockstep_loading: Loading
    _lockstep_base_sums: tuple[int, int]

    def lockstep_memory(self, asleep: Sequence[str]) -> DeviceState:
        """Returns the device's memory, and this worker's share of it while the parts `asleep` sleep."""
        if self.device.type == "cuda":
            resident = torch.cuda.memory_reserved(self.device) - worker.asleep_bytes(asleep)
        elif worker.WEIGHTS in asleep:
            resident = 0
        elif self._lockstep_plan_message:
            resident = self._lockstep_plan.num_bytes
        else:
            resident = sum(parameter.nbytes for parameter in worker.model_of(self).parameters())
        return device_state(self.device, resident_bytes=resident)

    def lockstep_fit(self, part: str, asleep: Sequence[str]) -> Fit:
        """Returns what waking `part` of the parts `asleep` needs; on CPU nothing."""
        needed = worker.wake_bytes(part, asleep) if self.device.type == "cuda" else 0
        state = self.lockstep_memory(asleep)
        return Fit(device_uuid=state["device_uuid"], needed_bytes=needed, free_bytes=state["device_free_bytes"])

    def lockstep_before_sleep(self) -> None:
        """Forgets the weights, frees memory that vLLM does not know of, and keeps what only vLLM has."""
        self._lockstep_base_sums = (0, 0)  # or a publication would leave out the base, which is lost
        if self.device.type == "cuda":
            worker.keep_plain_tensors(worker.model_of(self))
        if not self._lockstep_plan_message:
            return
        if self._lockstep_group is not None and self._lockstep_group.free_buffers():
            self._lockstep_loading.forget_buffers()
        if self.device.type == "cpu":
            with worker.weight_loading(self):
                worker.reload_weights(worker.model_of(self), self.model_config, _zeros(self._lockstep_plan))

    def lockstep_record_experts(self) -> None:
        record_experts(self)

    def lockstep_record_masks(self) -> bool:
        """Begins to record sampling masks. Returns whether this worker can."""
        return record_masks(self)

    def lockstep_join(self, group: bytes, plan: bytes, base_rank: int) -> JsonObject:
        """Joins the epoch. Returns the plan's digest as computed here, or the error.

        An error has `absent`, as in WeightGroup's errors, empty if nobody is known to be.
        """
        self.lockstep_leave()
        try:
            self._lockstep_set_plan(plan)
            message = types_pb2.WeightGroup.FromString(group)
            member = PairReceiver if message.backend == PAIRS else WeightGroup
            self._lockstep_group = member(message, rank=base_rank + worker.rank_of(self), device=self.device)
        except LockstepError as error:
            return {"error": error.message, "absent": error.metadata.get("absent", "")}
        return {"plan_digest": self._lockstep_plan.digest}

    def lockstep_receive(self, version: int) -> JsonObject:
        """Receives one publication into the live model.

        Returns the fields of rollout.v1.ReceiveWeightsResponse, or the error as `lockstep_join` does.
        Errors are returned, not raised, because vLLM would report the first failing worker only.
        """
        plan, loading, group = self._lockstep_plan, self._lockstep_loading, self._lockstep_group
        assert group is not None, "the servicer lets workers join before they receive"
        begin, cost = time.perf_counter(), Cost(self.device)
        try:
            base_sums = self._lockstep_base_sums
            # If all members have the same base, it is not sent again. The senders decide likewise.
            skips_base = plan.has_adapter and group.agrees(base_sums) and base_sums != (0, 0)
            digest = WeightDigest(plan.digest, self.device, base_sums if skips_base else (0, 0))
            arrivals = self._lockstep_arrivals(group, plan.first_bucket(skips_base=skips_base), digest, cost)
            if not skips_base:
                self._lockstep_base_sums = (0, 0)  # from here on the base may be partly overwritten
                self._lockstep_load_base(itertools.islice(arrivals, plan.num_base_buckets))
            if plan.has_adapter:
                self._lockstep_base_sums = digest.sums()
                self._lockstep_load_adapter(arrivals)
            if next(arrivals, None) is not None:  # the last bucket ends only when another one is asked for
                raise InternalError("more buckets arrived than the plan has")
            with cost.hashing():
                quantized = loading.quantized_digest()
            content = digest.hexdigest()
            group.acknowledge(version, content)
        except Exception as error:  # noqa: BLE001 the engine must stay reloadable after any error
            loading.abort()
            group.kill()
            self.lockstep_leave()
            return {"error": f"{type(error).__name__}: {error}", "absent": ""}
        return {
            "digest": content,
            "quantized_digest": quantized,
            "num_bytes": plan.num_bytes_sent(skips_base=skips_base),
            "duration_s": time.perf_counter() - begin,
            "wait_s": cost.wait_s,
            "cost": cost.measured(),
        }

    def lockstep_leave(self) -> None:
        group, self._lockstep_group = self._lockstep_group, None
        if group is not None:
            self._lockstep_loading.forget_buffers()
            group.abort()

    def _lockstep_set_plan(self, message: bytes) -> None:
        """Sets the plan. What was learned about the engine's memory is kept as long as the plan is the same."""
        if self._lockstep_plan_message != message:
            self._lockstep_plan = Plan(types_pb2.WeightPlan.FromString(message))
            self._lockstep_loading = Loading(worker.model_of(self), self.model_config, self._lockstep_plan, self.device)
            self._lockstep_plan_message, self._lockstep_base_sums = message, (0, 0)

    def _lockstep_load_base(self, arrivals: Arrivals) -> None:
        with worker.weight_loading(self):
            self._lockstep_loading.load(arrivals)
        if next(arrivals, None) is not None:
            raise InternalError("vLLM did not read all weights that were sent")

    def _lockstep_load_adapter(self, arrivals: Arrivals) -> None:
        tensors = {
            name: tensor.to("cpu", copy=True)  # the bucket's memory may be reused
            for _, bucket, flat in arrivals
            for name, tensor in unpack(bucket, flat)
        }
        # vLLM reads adapters from directories only.
        with tempfile.TemporaryDirectory(prefix="lockstep-adapter-") as directory:
            save_file(tensors, Path(directory) / "adapter_model.safetensors")
            (Path(directory) / "adapter_config.json").write_text(self._lockstep_plan.message.adapter_config_json)
            self.add_lora(adapter_request(directory, load_inplace=True))

    def _lockstep_arrivals(self, group: ReceivingMember, first: int, digest: WeightDigest, cost: Cost) -> Arrivals:
        buckets = self._lockstep_plan.buckets[first:]
        arriving = group.receive(buckets, in_place=self._lockstep_loading.reads_in_place)
        for index in itertools.count(first):
            begin = time.perf_counter()
            arrived = next(arriving, None)
            cost.wait_s += time.perf_counter() - begin
            if arrived is None:
                return
            bucket, flat = arrived
            with cost.hashing():
                digest.update(flat, start=bucket.start)
            yield index, bucket, flat
