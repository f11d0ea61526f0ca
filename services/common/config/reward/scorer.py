"""What every scorer's config has."""

from pydantic import Field

from services.common.config.base import Strict

ITEM_FIELDS = ("prompt", "answer", "extra", "completion", "num_tokens", "finish_reason")


class BaseScorerConfig(Strict):
    """What every scorer has."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of its component in results and metrics; its kind if unset. Needed when a kind is used twice."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of its score in the reward; 0 records the score without rewarding it."""

    @property
    def component(self) -> str:
        """Name of its component."""
        return self.name or str(getattr(self, "kind"))  # noqa: B009 every scorer config declares its own `kind`
