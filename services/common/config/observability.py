"""Defines the config section `observability`: Prometheus, OpenTelemetry, trackers and logs.

None of these settings affects the results of a run.
"""

from typing import Annotated, Literal

from pydantic import Field

from services.common.config.base import Strict


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
