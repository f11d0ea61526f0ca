"""Defines when a run saves checkpoints, how it publishes weights, how long its calls may take, and the config section
`observability`: Prometheus, OpenTelemetry, trackers and logs, none of which affects the results of a run.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator

from services.common.config.base import Seconds, Strict
from services.common.config.evaluation import BestConfig


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
    `mlflow` is installed, its file mlflow.db."""


TrackerConfig = Annotated[WandbConfig | MlflowConfig, Field(discriminator="kind")]


class WarningsConfig(Strict):
    """When a run warns that it learns little. Warnings are in the log, in metrics.jsonl and in the report."""

    entropy_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Warn if the policy's entropy per token falls below this share of its value in the run's first step; 0 never
    warns. The starting entropy differs between models by a factor of ten, so there is no limit in nats."""
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
    """Number of evaluations whose samples to keep in the run's directory; null keeps all. Those of older ones are
    deleted after a checkpoint, and the metrics of all stay. An evaluation that ends after the checkpoint of its step is
    one more until the next. `lockstep verify` does without what was deleted."""
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
