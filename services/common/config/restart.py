"""Defines the config section `restart`: what happens when a service that the coordinator started dies."""

from pydantic import Field

from services.common.config.base import Seconds, Strict


class RestartConfig(Strict):
    """Says how often a service that the coordinator started is restarted after it died."""

    max: int = Field(default=3, ge=0)
    """Maximum number of restarts within window_s of each service that was started with the run. If the service dies
    once more, the run ends with SERVICE_DIED. 0 never restarts a service. After a trainer's death the run resumes by
    itself from its newest checkpoint and the recorded batches, unless the trainer died while it loaded the model."""
    window_s: Seconds = 3600.0
    """Length in seconds of the period in which deaths are counted. Earlier ones are forgotten."""
