"""Defines the config of a lag between the weights that generate samples and the weights that are trained on them."""

from typing import Self

from pydantic import Field, model_validator

from services.common.config.base import Strict
from services.common.config.trainer.loss import LossConfig

# The kinds of loss that bound the ratio to the old policy for every token.
_TRUST_REGIONS = {"grpo", "ppo", "gspo", "cispo", "sapo", "dppo"}


class LagConfig(Strict):
    """Trains on samples of earlier weights, so that generating and training overlap completely."""

    versions: int = Field(default=0, ge=0, le=8)
    """Number k of versions by which samples lag: the batch that updates version t is drawn from exactly version t - k,
    while the trainer is still busy with the batches before it. The first k batches of a run are drawn from its first
    weights. 0 is exactly on-policy. A lag needs a loss with a bounded ratio (kind grpo, ppo, gspo, cispo, sapo or dppo)
    and old log-probabilities that are the engine's (trainer.loss.old_logprobs engine) or corrected
    (recompute with several mini-batches and trainer.loss.correction.weight)."""
    min_ess: float = Field(default=0.5, gt=0, le=1)
    """Fail the step, before any update is applied, if the effective sample size of a batch's importance weights, as a
    share of its tokens, is below this. The weights are exp(trainer - engine log-probability); the share is 1 if both
    agree exactly. Read only with a lag."""

    @model_validator(mode="after")
    def _gate_is_used(self) -> Self:
        if not self.versions and self.min_ess != type(self).model_fields["min_ess"].default:
            raise ValueError("lag.min_ess has no effect while lag.versions is 0: set lag.versions, or leave it out")
        return self


def check_lag(lag: LagConfig, loss: LossConfig, num_minibatches: int) -> None:
    """Raises ValueError if samples of earlier weights would be trained on as if they were the policy's own."""
    if not lag.versions:
        return
    if loss.kind not in _TRUST_REGIONS:
        kinds = ", ".join(sorted(_TRUST_REGIONS))
        raise ValueError(
            f"lag.versions {lag.versions} needs a loss that bounds the ratio to the weights that were sampled: set "
            f"loss.kind to one of {kinds}, not {loss.kind}, or lag.versions to 0"
        )
    is_corrected = loss.old_logprobs == "recompute" and num_minibatches > 1 and loss.correction.weight != "none"
    if loss.old_logprobs != "engine" and not is_corrected:
        raise ValueError(
            f"lag.versions {lag.versions} with loss.old_logprobs {loss.old_logprobs} would treat the samples as the "
            "policy's own: set loss.old_logprobs to engine, or to recompute with num_minibatches above 1 and "
            "loss.correction.weight token or sequence"
        )
