"""What the rollout service reads: sampling and the engine."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from services.common.config.base import Strict

MIN_TEMPERATURE = 0.01
"""Between 0 and this vLLM samples at this, and says so in its log only."""


def _is_sampled(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"vLLM would sample at {MIN_TEMPERATURE}; give that or more, or 0 for greedy samples")
    return temperature


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_is_sampled)]
"""What the engine samples at exactly."""


class SamplingConfig(Strict):
    """How completions are drawn."""

    temperature: Temperature = 1.0
    """Softmax temperature; the trainer divides its logits by the same. At least 0.01."""
    max_tokens: int = Field(default=1024, ge=1)
    """Most tokens of one completion, the stop token included."""
    top_p: float = 1.0
    """Only 1.0: the trainer's log-probabilities would not be those that were sampled from."""
    top_k: int = 0
    """Only 0 (off), for the same reason."""

    @model_validator(mode="after")
    def _no_truncation(self) -> Self:
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                "truncated sampling is refused: samples would come from another distribution than the one that is "
                "trained; leave top_p at 1.0 and top_k at 0 and use temperature"
            )
        return self


class RolloutConfig(Strict):
    """Replicas of the policy in vLLM."""

    num_replicas: int = Field(default=1, ge=1)
    """Replicas that `lockstep run` starts on this host when no address is given."""
    completions_per_prompt: int = Field(default=8, ge=1)
    """Samples of one prompt group, n."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training completions."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Engine weights; auto is bfloat16 on GPU and float32 on CPU."""
    max_model_len: int = Field(default=4096, ge=2)
    """Longest prompt plus completion, in tokens."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs (or CPU processes) of one replica."""
    max_samples: int = Field(default=256, ge=1)
    """Most samples that one engine runs at once (vLLM max_num_seqs)."""
    engine: dict[str, Any] = Field(default={})
    """More vLLM engine arguments, passed on untouched."""
