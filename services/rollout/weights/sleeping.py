"""Measures and prepares an engine worker's sleep, in which its weights and KV cache are freed.

vLLM frees and takes the memory on GPU. On CPU it ignores the calls; there the weights are overwritten with zeros, so
that an engine that served them would be noticed, and the KV cache stays.
"""

from collections.abc import Iterator
from typing import TypedDict

import torch

from services.common.memory import DeviceState, device_state
from services.common.weights.group import WeightGroup
from services.common.weights.pairs.ends import PairReceiver
from services.common.weights.plan import Plan
from services.rollout.compat.vllm.memory import KV_CACHE, WEIGHTS, asleep_bytes, wake_bytes
from services.rollout.compat.vllm.reload import reload_weights
from services.rollout.compat.vllm.worker import WorkerExtension, model_of, weight_loading
from services.rollout.weights.loading import Loading

ReceivingMember = WeightGroup | PairReceiver


class Fit(TypedDict):
    """Compares the bytes that a part needs with those that are free on the device."""

    device_uuid: str
    needed_bytes: int
    free_bytes: int


class SleepingWorker(WorkerExtension):
    """Knows which parts of the worker's memory sleep. The engine calls vLLM's own sleep and wake_up in between."""

    _lockstep_asleep: frozenset[str] = frozenset()
    _lockstep_group: ReceivingMember | None = None
    _lockstep_plan_message = b""  # empty until a weight group was joined; the other attributes are set with it
    _lockstep_plan: Plan
    _lockstep_loading: Loading
    _lockstep_base_sums: tuple[int, int]

    def lockstep_memory(self) -> DeviceState:
        """Returns the device's memory, and this worker's share of it."""
        if self.device.type == "cuda":
            resident = torch.cuda.memory_reserved(self.device) - asleep_bytes(self._lockstep_asleep)
        else:
            resident = 0 if WEIGHTS in self._lockstep_asleep else self._lockstep_weight_bytes()
        return device_state(self.device, resident_bytes=resident)

    def lockstep_fit(self, part: str) -> Fit:
        """Returns what waking `part` needs; on CPU nothing."""
        needed = wake_bytes(part, self._lockstep_asleep) if self.device.type == "cuda" else 0
        state = self.lockstep_memory()
        return {
            "device_uuid": state["device_uuid"],
            "needed_bytes": needed,
            "free_bytes": state["device_free_bytes"],
        }

    def lockstep_before_sleep(self) -> None:
        """Forgets the weights, and frees memory that vLLM does not know of."""
        self._lockstep_base_sums = (0, 0)  # or a publication would leave out the base, which is lost
        if not self._lockstep_plan_message:
            return
        if self._lockstep_group is not None and self._lockstep_group.free_buffers():
            self._lockstep_loading.forget_buffers()
        if self.device.type == "cpu":
            with weight_loading(self):
                reload_weights(model_of(self), self.model_config, _zeros(self._lockstep_plan))

    def lockstep_after_sleep(self) -> None:
        """Notes that all parts sleep."""
        self._lockstep_asleep = frozenset((WEIGHTS, KV_CACHE))

    def lockstep_after_wake(self, part: str) -> None:
        """Notes that `part` is awake."""
        self._lockstep_asleep -= {part}

    def _lockstep_weight_bytes(self) -> int:
        if self._lockstep_plan_message:
            return self._lockstep_plan.num_bytes
        return sum(parameter.nbytes for parameter in model_of(self).parameters())


def _zeros(plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields zeros instead of all weights of the plan but adapters."""
    specs = plan.message.tensors[: plan.message.num_base_tensors if plan.has_adapter else None]
    for spec in specs:
        yield spec.name, torch.zeros(tuple(spec.shape), dtype=getattr(torch, spec.dtype))
