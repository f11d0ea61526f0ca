"""How a run is watched: Prometheus, OpenTelemetry, trackers and logs. None of it changes a number of the run."""

from typing import Annotated, Literal

from pydantic import Field

from services.common.config.base import Strict


class WandbConfig(Strict):
    """Numbers of every step in Weights & Biases; extra: wandb."""

    kind: Literal["wandb"] = "wandb"
    """Weights & Biases."""
    project: str = Field(default="lockstep", min_length=1)
    """Project, which is made if there is none."""
    entity: str | None = Field(default=None, min_length=1)
    """User or team; the account's own default if unset."""
    mode: Literal["online", "offline"] = "online"
    """offline keeps the numbers in the run's directory, for `wandb sync`."""


class MlflowConfig(Strict):
    """Numbers of every step in MLflow; extra: mlflow."""

    kind: Literal["mlflow"] = "mlflow"
    """MLflow."""
    experiment: str = Field(default="lockstep", min_length=1)
    """Experiment, which is made if there is none."""
    uri: str | None = Field(default=None, min_length=1)
    """Tracking URI, such as http://HOST:5000; MLflow's own default if unset."""


TrackerConfig = Annotated[WandbConfig | MlflowConfig, Field(discriminator="kind")]


class ObservabilityConfig(Strict):
    """How the run is watched. All of it may differ when a run goes on."""

    metrics_address: str = ""
    """HOST:PORT of the coordinator's page for Prometheus; none if empty. Services started here get one each too."""
    metrics_insecure: bool = False
    """Serve that page on an interface other than loopback."""
    otel_endpoint: str = ""
    """URL of an OTLP/gRPC collector for a trace of each step, services included; none if empty. Extra: otel."""
    log_format: Literal["text", "json"] = "text"
    """Lines of logs/: for people, or JSON objects."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Where else the numbers go, each with its kind."""
