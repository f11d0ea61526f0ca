"""What the coordinator reads to make prompts."""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, JsonValue, field_validator

from services.common.config.base import NAME, Strict


class FilesConfig(Strict):
    """Parquet files of rows, and how they become text."""

    train: tuple[Path, ...] = Field(min_length=1)
    """Parquet file of training rows, or a list of files that are read as one, in this order."""
    eval: dict[str, Path] = Field(default_factory=dict)
    """Held-out Parquet files by the name that their metrics and samples carry, of letters, digits, `.`, `_` and `-`; a
    bare path is named `<folder>-<file>`."""
    shuffle: bool = True
    """A new order in every epoch, drawn from the run's seed; otherwise always the order of the files."""
    prompt_column: str = "prompt"
    """Column of prompts: text, or a list of messages with role and content."""
    overlong: Literal["fail", "drop"] = "fail"
    """A row that is too long is an error, or is left out and counted in the log."""
    bad_rows: Literal["fail", "drop"] = "fail"
    """A row that cannot be used is an error, or is left out and counted in the log."""
    chat: bool = False
    """Put text into the model's chat template, a prompt as one user message. Lists of messages are always templated."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message put before every templated row."""
    template_date: datetime.date | None = None
    """Today's date for a chat template that asks for it: fixed, so that a resumed run sees the same rows."""
    add_special_tokens: bool = True
    """Let the tokenizer put its special tokens, such as BOS, around a text prompt. Never done to templated prompts: the
    template writes its own."""
    chat_template: Path | None = None
    """Jinja file used in place of the model's own chat template."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Further variables of the chat template, such as enable_thinking."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str | Path) else value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_ours(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted({"messages", "add_generation_prompt"} & value.keys()):
            raise ValueError(f"{taken[0]} is set by the run itself; remove it")
        return value

    @field_validator("eval")
    @classmethod
    def _are_names(cls, value: dict[str, Path]) -> dict[str, Path]:
        for name, path in value.items():
            if not re.fullmatch(NAME, name):
                raise ValueError(
                    f"{name!r} is no name: give letters, digits, '.', '_' and '-', the first a letter or digit, as in "
                    f"{{held-out: {path}}}"
                )
        return value

    @field_validator("eval", mode="before")
    @classmethod
    def _name_paths(cls, value: Any) -> Any:
        given: Any = (value,) if isinstance(value, str | Path) else value
        if not isinstance(given, list | tuple):
            return value
        paths = cast(Sequence[Any], given)
        if not all(isinstance(path, str | Path) for path in paths):
            return value
        named = {_name_of(Path(path)): path for path in paths}
        if len(named) < len(paths):
            raise ValueError("two files would have the same name: name them, as in {short: a.parquet, long: b.parquet}")
        return named


def _name_of(path: Path) -> str:
    parts = (re.sub(r"[^A-Za-z0-9._-]", "_", part) for part in (path.parent.name, path.stem))
    return "-".join(part for part in parts if part.strip(".")).lstrip("._-")


class DataConfig(FilesConfig):
    """Prompts to train on and to evaluate on, as Parquet files."""

    max_eval_prompts: int | None = Field(default=None, ge=1)
    """Only the first rows of each eval file; all if unset."""
    prompts_per_step: int = Field(ge=1)
    """Prompt groups of one batch, all different."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, template and special tokens included."""
    answer_column: str = "answer"
    """Column of reference answers: text, handed to the scorer."""
    extra_columns: tuple[str, ...] | None = None
    """Further columns handed to the scorer; all of them if unset."""
