"""Defines when a run saves checkpoints, how it publishes weights, how long its calls may take, and the config section
`observability`: Prometheus, OpenTelemetry, trackers and logs, none of which affects the results of a run.

It also checks that trainer and engines go together: on shared GPUs, where every rank has exactly one engine worker, and
if the engines compute in float8.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator

from services.common.config.base import Seconds, Strict
from services.common.config.evaluation import BestConfig
from services.common.config.rollout import RolloutConfig
from services.common.config.trainer import TrainerConfig


class WandbConfig(Strict):
    kind: Literal["wandb"] = "wandb"
    """Log the metrics of every step to Weights & Biases. Install the extra `wandb`."""
    project: str = Field(default="lockstep", min_length=1)
    """Project name; the project is created if it does not exist."""
    entity: str | None = Field(default=None, min_length=1)
    """User or team that owns the project; null uses the account's default."""
    mode: Literal["online", "offline"] = "online"
    """offline writes to the run's directory, to be uploaded later with `wandb sync`."""


class MlflowConfig(Strict):
    kind: Literal["mlflow"] = "mlflow"
    """Log the metrics of every step to MLflow. Install the extra `mlflow`."""
    experiment: str = Field(default="lockstep", min_length=1)
    """Experiment name; the experiment is created if it does not exist."""
    uri: str | None = Field(default=None, min_length=1)
    """Tracking URI of a server, such as http://HOST:5000; null uses MLFLOW_TRACKING_URI or, if the whole package
    `mlflow` is installed, its file mlflow.db. Set user and password in the environment variables
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, because a run keeps its config in files."""


TrackerConfig = Annotated[WandbConfig | MlflowConfig, Field(discriminator="kind")]


class WarningsConfig(Strict):
    """When a run warns that it learns little. Warnings are in the log, in metrics.jsonl and in the report."""

    entropy_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Warn if the policy's entropy per token falls below this share of its value in the run's first step; 0 never
    warns. Starting entropies differ between models by a factor of ten, so this is no limit in nats."""
    steps_without_mixed_group: int = Field(default=3, ge=0)
    """Warn after this many steps in a row in which no prompt group had different rewards, so that nothing was learned.
    0 never warns. With few prompts per step, a single such step can be chance."""
    dropped_groups: float = Field(default=0.1, ge=0, le=1)
    """Warn if more than this share of a step's prompt groups was dropped because a sample had no score; 1 never
    warns. The batch is then a biased choice of prompts."""


class ObservabilityConfig(Strict):
    """Metrics, traces, trackers and logs. All keys may be changed when a run resumes."""

    metrics_address: str = ""
    """HOST:PORT to serve the coordinator's Prometheus metrics on; empty serves none. Services that this command starts
    then serve their own metrics too."""
    metrics_insecure: bool = False
    """Allow metrics_address to be an interface other than loopback. Metrics are plaintext and unauthenticated."""
    otel_endpoint: str = ""
    """URL of an OTLP/gRPC collector to send a trace of each step to, including the services' spans; empty sends none.
    Install the extra `otel`."""
    log_format: Literal["text", "json"] = "text"
    """Format of the lines in logs/: text for people, or JSON objects."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Experiment trackers to log metrics to; each entry has a kind, wandb or mlflow."""
    sample_freq: int = Field(default=1, ge=0)
    """Show one sample (prompt, completion or episode, and reward) of every this many steps below the live table of a
    terminal; 0 shows none. `lockstep sft` shows none."""
    warnings: WarningsConfig = WarningsConfig()
    """When to warn that a run learns little."""

    @field_validator("metrics_address")
    @classmethod
    def _names_its_port(cls, address: str) -> str:
        if address.endswith(":0"):
            raise ValueError("0 is any free port, which prometheus.json could not name: choose one, such as 9100")
        return address

    def quiet(self) -> Self:
        """Returns these settings without what another run of the same config may have in use: ports and trackers."""
        return self.model_copy(update={"metrics_address": "", "trackers": ()})


class CheckpointConfig(Strict):
    """When to save checkpoints and how many to keep."""

    save_freq: int = Field(default=0, ge=0)
    """Save a checkpoint every this many steps, and after the last step; 0 turns this off. A run that is stopped early
    always saves a checkpoint."""
    max_ckpts_to_keep: int = Field(default=3, ge=1)
    """Number of policy checkpoints to keep. Older ones are deleted after a newer one has been verified."""
    max_critic_ckpts_to_keep: int = Field(default=1, ge=1)
    """Number of critic checkpoints to keep. A run with a critic can resume only from a step that has both
    checkpoints."""
    max_batches_to_keep: int | None = Field(default=None, ge=1)
    """Number of batches to keep in the run's directory, with the agents' calls beside them; null keeps all. Older ones
    are deleted after a checkpoint, except those of the steps after the oldest checkpoint that max_ckpts_to_keep keeps,
    because a resumed run trains on them again, and with trainer.lag those that were sampled before the best checkpoint
    and trained on after it. `lockstep verify` and `replay` do without what was deleted."""
    max_evaluations_to_keep: int | None = Field(default=None, ge=1)
    """Number of evaluations whose samples to keep in the run's directory; null keeps all. Samples of older ones are
    deleted after a checkpoint; all metrics stay. An evaluation that ends after the checkpoint of its step is kept in
    addition, until the next. `lockstep verify` does without what was deleted."""
    keep_best: BestConfig | None = None
    """Also keep the checkpoint of the step with the best value of this held-out metric, such as eval/test/reward, and
    the critic's of that step; null keeps only the newest. evaluation.eval_freq must be a multiple of save_freq."""
    export_at_end: bool = True
    """Export the final policy as a Hugging Face model directory, `model` in the run's directory."""

    def check_rules(self) -> None:
        for name in ("max_batches_to_keep", "max_evaluations_to_keep"):
            if getattr(self, name) is not None and not self.save_freq:
                raise ValueError(f"{name} deletes files after a checkpoint: set save_freq above 0")


class WeightsConfig(Strict):
    """Publication: sending weights from the trainer to the rollout replicas."""

    bucket_bytes: int | None = Field(default=None, ge=1 << 10, le=1 << 40)
    """Maximum bucket size in bytes. Weights are packed, sent and loaded one bucket at a time; a tensor larger than this
    gets a bucket of its own. null: 512 MiB, or 1280 MiB with placement colocated."""
    timeout_s: Seconds = 60.0
    """Seconds that a member of the weight group waits for another member before it aborts the publication."""


class TimeoutsConfig(Strict):
    """Deadlines of calls, in seconds."""

    info_s: Seconds = 10.0
    """Deadline in seconds for GetInfo and other small requests."""
    open_s: Seconds = 600.0
    """Deadline in seconds for OpenRun, which starts engines and loads models."""
    generate_s: Seconds = 3600.0
    """Deadline in seconds for generating one prompt group. A replica that reaches it is assumed to hang: its groups go
    to other replicas, and its engine is replaced."""
    score_s: Seconds = 300.0
    """Deadline in seconds for scoring one prompt group, including waiting. A group that reaches it goes to the end of
    the queue, and the run ends only if the reward service scored no other group meanwhile."""
    train_s: Seconds = 3600.0
    """Deadline in seconds for one Forward or Train call, which processes one batch."""
    publish_s: Seconds = 300.0
    """Deadline in seconds for each call of a publication: joining the weight group, sending, receiving, committing."""
    memory_s: Seconds = 300.0
    """Deadline in seconds for each call that frees or takes GPU memory: Sleep, Wake, ReleaseMemory, AcquireMemory."""
    checkpoint_s: Seconds = 1800.0
    """Deadline in seconds for saving, loading or exporting a checkpoint."""
    lease_s: Seconds = 1800.0
    """Seconds for which a service that was given by address keeps the run open after its coordinator was killed or cut
    off. A run that resumes within this time finds its engines running and the trainer in the state that it was in.
    Afterwards the service frees its GPU, and the run resumes from its newest checkpoint."""


Placement = Literal["disaggregated", "colocated"]

SHARED_UTILIZATION = 0.8
"""gpu_memory_utilization of an engine that can sleep; vLLM's own default, 0.92, leaves no room for a second process."""

BUCKET_BYTES: Mapping[Placement, int] = {"disaggregated": 512 << 20, "colocated": 1280 << 20}
"""Default of weights.bucket_bytes. On a shared GPU the two processes take turns, bucket by bucket, and each turn costs
more than packing and loading can gain by overlap."""

# What turns on CUDA graphs in Megatron.
_GRAPHS = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")


def check_placement(trainer: TrainerConfig, rollout: RolloutConfig, deployments: Mapping[str, str]) -> None:
    """Raises ValueError if the placement cannot be colocated. `deployments` has those of the other models."""
    for name, deployment in deployments.items():
        if deployment == "own":
            raise ValueError(
                f"{name}.deployment own needs GPUs of its own, but placement colocated has only those that trainer and "
                f"engines share: set {name}.deployment shared, or placement disaggregated"
            )
    if rollout.can_sleep and trainer.lag.versions:
        raise ValueError(
            f"trainer.lag.versions {trainer.lag.versions} lets trainer and engines work at the same time, which "
            "they cannot with placement colocated: set trainer.lag.versions 0, placement disaggregated, or, if both "
            "fit on the GPU, rollout.engine.enable_sleep_mode false"
        )
    if rollout.discovery:
        raise ValueError(
            "rollout.discovery lets replicas come and go, but with placement colocated each shares GPUs with the "
            "trainer's ranks: leave it out, or set placement disaggregated"
        )
    if not rollout.can_sleep and "gpu_memory_utilization" not in rollout.engine:
        raise ValueError(
            "rollout.engine.enable_sleep_mode false: with placement colocated the engine keeps its memory while the "
            "trainer works; set rollout.engine.gpu_memory_utilization to a share that leaves the trainer enough"
        )
    graphs = trainer.megatron.transformer_config_kwargs
    if on := [key for key in _GRAPHS if graphs.get(key, "none") not in (False, None, "none")]:
        raise ValueError(
            f"trainer.megatron.transformer_config_kwargs.{on[0]}: a CUDA graph reads weights where they were when it "
            "was captured, and with placement colocated they are elsewhere after every release; leave it out"
        )
    sizes = {"rollout.num_replicas": rollout.num_replicas, **rollout.parallel_sizes}
    num_workers = math.prod(sizes.values())
    if num_workers != trainer.num_ranks:
        product = " x ".join(f"{key} {size}" for key, size in sizes.items())
        raise ValueError(
            f"placement colocated needs one engine worker for each trainer rank, but trainer.num_ranks is "
            f"{trainer.num_ranks} and there are {num_workers} workers ({product}); make them equal"
        )


def check_precision(trainer: TrainerConfig, rollout: RolloutConfig) -> None:
    """Raises ValueError if samples of an engine that computes in float8 would be taken for the policy's own."""
    key = rollout.quantized_key
    if key and not trainer.loss.corrects_engine:
        raise ValueError(
            f"rollout.{key} fp8: the engine samples from another distribution than the trainer's, and the loss does "
            "not correct for it: set trainer.loss.correction.weight token (TIS) or trainer.loss.correction.token_mask "
            f"(IcePop), or leave rollout.{key} out"
        )
    if key and trainer.lora.published_rank:
        raise ValueError(
            f"rollout.{key} fp8 with trainer.lora.publish adapter: a quantized base with adapters was not compared "
            "with the trainer; set trainer.lora.publish merged"
        )


class RestartConfig(Strict):
    """How often a service that the coordinator started is restarted after it died."""

    max: int = Field(default=3, ge=0)
    """Maximum number of restarts within window_s of each service that was started with the run. If the service dies
    once more, the run ends with SERVICE_DIED. 0 never restarts a service. After a trainer's death the run resumes by
    itself from its newest checkpoint and the recorded batches, unless the trainer died while it loaded the model."""
    window_s: Seconds = 3600.0
    """Length in seconds of the period in which deaths are counted. Earlier ones are forgotten."""
