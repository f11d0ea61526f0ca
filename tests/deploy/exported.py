"""Lists every metric that a process of Lockstep exports, from all registries, each of which was given some values."""

from dataclasses import dataclass
from types import SimpleNamespace

import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp
from prometheus_client import CollectorRegistry

from services.common.errors import InvalidInput
from services.common.rpc.server import Metrics, RpcMetrics
from services.common.telemetry import Span
from services.coordinator.observe.reporters import Prometheus
from services.reward.metrics import RewardMetrics
from services.rollout.metrics import RolloutMetrics, State
from services.trainer.metrics import TrainerMetrics


@dataclass(frozen=True)
class Exported:
    """Describes one metric. `samples` are the names that Prometheus stores."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str
    samples: tuple[str, ...]


def exported() -> dict[str, dict[str, Exported]]:
    """Returns the metrics by process and name; those that all processes have are under `all`."""
    registries = {name: Metrics(name) for name in ("all", "rollout", "trainer", "reward", "coordinator")}
    rpc = RpcMetrics(registries["all"].registry)
    try:
        with rpc.call(Span("Score")):
            raise InvalidInput("x")
    except InvalidInput:
        pass
    RolloutMetrics(registries["rollout"].registry, lambda: State(3, 2, PolicyStamp(version=1, digest="d")))
    trainer = TrainerMetrics(registries["trainer"].registry)
    trainer.version.labels("policy").set(1)
    with trainer.phase("train", "policy"):
        trainer.trained("policy", pa.table({"prompt_tokens": [[1]], "tokens": [[2, 3]]}))
    reward = RewardMetrics(registries["reward"].registry)
    reward.scores.labels("exact", "scored").inc()
    reward.environment_seconds.labels("step").observe(1.0)
    reward.environment_failures.labels("timeout").inc()
    reward.tool_calls.labels("ok").inc()
    coordinator = Prometheus(registries["coordinator"], "run-1")
    coordinator.watch(SimpleNamespace(num_dead=0, num_redispatched=0))
    coordinator.end_phase("training", 0.5)
    coordinator.step(1, {"time/step_s": 1.0, "batch/tokens": 2.0, "reward/mean": 0.5})
    found = {name: _metrics(metrics.registry) for name, metrics in registries.items()}
    common = found.pop("all")
    own = {name: {k: v for k, v in found[name].items() if k not in common} for name in found}
    return {"all": common, **own}


def _metrics(registry: CollectorRegistry) -> dict[str, Exported]:
    metrics = {}
    for family in registry.collect():
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        samples = tuple(sorted({sample.name for sample in family.samples}))
        metrics[name] = Exported(name, family.type, tuple(labels), family.documentation, samples)
    return metrics
