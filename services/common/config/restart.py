"""Defines the config section `restart`: what happens when a service that the coordinator started dies."""

from pydantic import Field

from services.common.config.base import Strict


class RestartConfig(Strict):
    """Says how often a service that the coordinator started is started again after it died."""

    max: int = Field(default=3, ge=0)
    """How often each of the services that were started with the run is started again within window_s; if it dies once
    more, the run ends with SERVICE_DIED. 0 never starts one again. After a trainer's death the run resumes from its
    newest checkpoint and the recorded batches, by itself, unless the trainer died while it loaded the model."""
    window_s: float = Field(default=3600.0, gt=0)
    """Seconds in which these deaths are counted. Earlier ones are forgotten."""
