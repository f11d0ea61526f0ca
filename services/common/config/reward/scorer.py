"""Defines the keys that every scorer has."""

from pydantic import Field

from services.common.config.base import Strict

ITEM_FIELDS = ("prompt", "answer", "extra", "completion", "num_tokens", "finish_reason")


class BaseScorerConfig(Strict):
    """Holds the keys that every scorer has."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of this scorer's component in results and metrics; null uses the kind. Required if a kind is used twice.
    Names of other metrics, such as mean or reward, are refused."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Weight of this score in the reward; 0 only records the score."""

    @property
    def component(self) -> str:
        """Returns the name of this scorer's component."""
        return self.name or str(getattr(self, "kind"))  # noqa: B009 every scorer config declares its own `kind`
