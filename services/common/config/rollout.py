"""Defines the config section `rollout`: sampling and the engine."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from services.common.config.base import Strict
from services.common.config.discovery import DiscoveryConfig
from services.common.config.speculation import SpeculationConfig

MIN_TEMPERATURE = 0.01
"""vLLM raises any temperature between 0 and this to this, and only logs that it did."""


def _is_sampled(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"vLLM would sample at {MIN_TEMPERATURE}; set at least that, or 0 for greedy decoding")
    return temperature


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_is_sampled)]
"""A temperature that the engine uses exactly as given."""


class SamplingConfig(Strict):
    """Says how completions are sampled."""

    temperature: Temperature = 1.0
    """Sampling temperature, at least 0.01. The trainer divides its logits by the same value."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum tokens per completion, including the stop token."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, such as "</search>", in addition to the model's stop tokens. The completion keeps
    the token that completes a text. Special tokens have no text, so they cannot be found this way."""
    top_p: float = 1.0
    """Must be 1.0: with nucleus sampling, completions would not follow the distribution that the trainer computes.
    evaluation.sets can set it."""
    top_k: int = 0
    """Must be 0 (off), for the same reason as top_p."""
    min_p: float = 0.0
    """Must be 0 (off), for the same reason as top_p."""

    @model_validator(mode="after")
    def _no_truncation(self) -> Self:
        if self.top_p != 1.0 or self.top_k != 0 or self.min_p != 0.0:
            raise ValueError(
                "truncated sampling is refused: samples would not come from the distribution that is trained; leave "
                "top_p at 1.0, top_k and min_p at 0 and use temperature; evaluation.sets.NAME may set them"
            )
        return self


class RolloutConfig(Strict):
    """Configures the replicas of the policy in vLLM."""

    num_replicas: int = Field(default=1, ge=1)
    """Number of replicas that `lockstep run` starts on this host if no --rollout address is given and `discovery` is
    unset."""
    discovery: DiscoveryConfig | None = None
    """Where to find the replicas. They may change during the run: a new one takes part from the next publication, and
    one that is no longer listed gets no more prompts. Unset, the replicas are those of --rollout, or those started
    here, and `lockstep replicas` changes them."""
    completions_per_prompt: int = Field(default=8, ge=1)
    """Number n of samples per prompt, which form one prompt group."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training completions."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the engine's weights; auto is bfloat16 on GPU and float32 on CPU."""
    max_model_len: int = Field(default=4096, ge=2)
    """Maximum length of prompt plus completion, in tokens (vLLM max_model_len)."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs (or CPU processes) per replica (vLLM tensor_parallel_size)."""
    max_samples: int = Field(default=256, ge=1)
    """Maximum number of samples that one engine generates concurrently (vLLM max_num_seqs)."""
    speculation: SpeculationConfig | None = None
    """Speculative decoding: tokens are drafted cheaply, and the engine verifies several of them in one step. Samples
    keep their distribution and log-probabilities. If unset, the engine generates one token per step."""
    engine: dict[str, Any] = Field(default={})
    """Additional vLLM engine arguments, passed through unchanged. speculative_config is refused: set speculation."""

    @field_validator("engine")
    @classmethod
    def _speculation_is_lossless(cls, engine: dict[str, Any]) -> dict[str, Any]:
        if engine.get("speculative_config"):
            raise ValueError(
                "speculative_config is refused: vLLM also has methods that change what is sampled, and some that were "
                "not compared with the trainer; set rollout.speculation instead"
            )
        return engine
