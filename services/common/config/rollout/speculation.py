"""Defines the config section `rollout.speculation`: speculative decoding."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from services.common.config.base import Strict


class _Speculation(Strict):
    num_tokens: int = Field(default=4, ge=1, le=16)
    """Maximum number of tokens that are drafted for a sample at a time. The engine verifies all of them in one step and
    keeps those up to the first that it rejects."""


class NgramSpeculationConfig(_Speculation):
    """Drafts what followed the same tokens before, in the prompt or in the sample itself."""

    kind: Literal["ngram"] = "ngram"
    """Drafts what followed the sample's last tokens where they occurred before, in its prompt or in itself. It needs no
    other model and no GPU memory."""
    min_match: int = Field(default=2, ge=1)
    """Smallest number of last tokens that must have occurred before."""
    max_match: int = Field(default=5, ge=1)
    """Largest number of last tokens that are looked for; the longest match is used."""

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is above max_match {self.max_match}; make it at most that")
        return self

    def for_vllm(self) -> dict[str, Any]:
        """Returns vLLM's speculative_config."""
        return {
            "method": "ngram",
            "num_speculative_tokens": self.num_tokens,
            "prompt_lookup_min": self.min_match,
            "prompt_lookup_max": self.max_match,
        }


class SuffixSpeculationConfig(_Speculation):
    """Drafts what most often followed the same tokens before, in the prompt, the sample and, if set, other samples."""

    kind: Literal["suffix"]
    """Drafts what most often followed the sample's last tokens where they occurred before, in its prompt or in itself
    (suffix decoding). A draft is never longer than the tokens that occurred before. It needs no other model and no GPU
    memory, but the package arctic-inference 0.1.1 on the host of each replica."""
    cached_samples: int = Field(default=0, ge=0, le=1_000_000)
    """Number of the engine's latest samples, of whatever weights, in which the tokens are looked for too. It helps if
    the samples of a prompt group share text. What a seed samples then depends on the other samples, so that a resumed
    run does not repeat the same bits, not even on CPU. 0 looks into no other sample."""
    min_probability: float = Field(default=0.1, ge=0, le=1)
    """Smallest share of the earlier occurrences that must have continued as the draft does."""

    def for_vllm(self) -> dict[str, Any]:
        """Returns vLLM's speculative_config."""
        return {
            "method": "suffix",
            "num_speculative_tokens": self.num_tokens,
            "suffix_decoding_max_cached_requests": self.cached_samples,
            "suffix_decoding_min_token_prob": self.min_probability,
        }


class Eagle3SpeculationConfig(_Speculation):
    """Drafts with an EAGLE-3 head, which reads hidden states of the policy."""

    kind: Literal["eagle3"]
    """Drafts with an EAGLE-3 head, a small model that reads hidden states of the policy. It stays as it is while the
    policy is trained, so fewer of its tokens are accepted as the run goes on."""
    draft: Path
    """Directory of the head in Hugging Face format, on the host of each replica."""

    def for_vllm(self) -> dict[str, Any]:
        """Returns vLLM's speculative_config."""
        return {
            "method": "eagle3",
            "model": str(self.draft),
            "num_speculative_tokens": self.num_tokens,
            "draft_load_config": {"load_format": "auto"},  # unlike the policy's, its weights are never published
        }


SpeculationConfig = Annotated[
    NgramSpeculationConfig | SuffixSpeculationConfig | Eagle3SpeculationConfig, Field(discriminator="kind")
]
