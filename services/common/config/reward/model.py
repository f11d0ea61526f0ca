"""The scorer that is a sequence-classification model."""

from typing import Literal

from pydantic import Field

from services.common.config.reward.scorer import BaseScorerConfig


class ModelConfig(BaseScorerConfig):
    """A reward model: a Hugging Face sequence-classification directory, run by a worker process of its own."""

    kind: Literal["model"] = "model"
    """Runs a reward model."""
    path: str = Field(min_length=1)
    """Directory on the reward service's machine: config.json, tokenizer, safetensors weights. No code of it is run."""
    label: int | None = Field(default=None, ge=0)
    """Index of the label whose logit is the score; needed unless the model has one label."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """chat: user and assistant message in its chat template; plain: prompt + completion; auto: chat if it has one."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")
    """auto is the first GPU that the service sees, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; auto keeps the one that they are stored in."""
    batch_size: int = Field(default=8, ge=1)
    """Most samples of a group in one forward pass. A model without pad_token_id takes them one by one."""
    max_tokens: int | None = Field(default=None, ge=1)
    """A longer sample has no score; the model's max_position_embeddings if unset."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Most seconds for one prompt group, from when the worker takes it; the worker is then killed and loads again."""
    start_timeout_s: float = Field(default=540.0, gt=0, le=3600)
    """Most seconds for loading; the coordinator waits for timeouts.open_s in all."""
