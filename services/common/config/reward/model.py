"""Defines the config of the scorer that runs a sequence-classification model."""

from typing import Literal

from pydantic import Field

from services.common.config.reward.scorer import BaseScorerConfig


class ModelConfig(BaseScorerConfig):
    """Scores with a reward model: a Hugging Face sequence-classification model in a worker process of its own."""

    kind: Literal["model"] = "model"
    """Score with a reward model (a Hugging Face sequence-classification model). Install the extra `reward-model`."""
    path: str = Field(min_length=1)
    """Model directory on the reward service's host, with config.json, tokenizer and safetensors weights. Code in the
    directory is never run."""
    label: int | None = Field(default=None, ge=0)
    """Index of the label whose logit is the score; required unless the model has exactly one label."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """Text that the model reads. chat: prompt and completion as a user and an assistant message in the reward model's
    chat template; plain: prompt + completion; auto: chat if the reward model has a chat template, else plain."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")
    """Device of the model: cpu, cuda or cuda:N; auto is the first GPU that the service sees, or the CPU if there is
    none."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights; auto keeps the one they are stored in."""
    batch_size: int = Field(default=8, ge=1)
    """Maximum number of samples of a group in one forward pass. A model without pad_token_id gets one sample at a
    time."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum length of a sample in tokens; a longer sample is a scoring failure. null uses the model's
    max_position_embeddings."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Time limit in seconds for one prompt group, from when the worker takes it. On a timeout the worker is killed and
    loads the model again."""
    start_timeout_s: float = Field(default=540.0, gt=0, le=3600)
    """Time limit in seconds for loading the model. The coordinator waits for at most timeouts.open_s in all."""
