"""The base of every config model."""

from pydantic import BaseModel, ConfigDict

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of what files and directories are named by."""


class Strict(BaseModel):
    """Unknown keys are errors, nothing mutates it, and a default is checked like any other value."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)
