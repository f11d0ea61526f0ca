"""Defines when a run saves checkpoints, how it publishes weights, and how long its calls may take."""

from pydantic import Field

from services.common.config.base import Seconds, Strict
from services.common.config.evaluation import BestConfig


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
    keep_best: BestConfig | None = None
    """Also keep the checkpoint of the step with the best value of this held-out metric, such as eval/test/reward, and
    the critic's of that step; null keeps only the newest. evaluation.eval_freq must be a multiple of save_freq."""
    export_at_end: bool = True
    """Export the final policy as a Hugging Face model directory, `model` in the run's directory."""


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
