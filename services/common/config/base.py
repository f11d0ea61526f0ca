"""Defines the base class of every config model."""

from pydantic import BaseModel, ConfigDict

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern that a name must match to be used for a file or directory."""


class Strict(BaseModel):
    """Rejects unknown keys, is immutable, and validates defaults like any other value."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)
