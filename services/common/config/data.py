"""Defines the config section `data`: the files that the coordinator reads and how it turns rows into prompts."""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import Field, JsonValue, field_validator

from services.common.config.base import AT_HOME, NAME, Strict


class FilesConfig(Strict):
    """The files of rows, and how rows become text."""

    train: Annotated[tuple[Path, ...], AT_HOME] = Field(min_length=1)
    """File with the training rows, or a list of files that are concatenated in this order. The ending of the name says
    what is in it: .parquet; .jsonl or .ndjson, one JSON object per line; .json, a list of objects, or one per line;
    .csv, columns of text. All but Parquet may be compressed (.jsonl.gz). A pattern, such as data/*.parquet, is all
    files that match, sorted. hf://datasets/OWNER/NAME@REVISION/FILE is a file of a dataset on the Hugging Face Hub;
    @REVISION is by default the newest. There, FILE may be a pattern in which * is any text without a slash. Without
    /FILE, it is the dataset's training split, if that is in one folder."""
    eval: Annotated[dict[str, Path], AT_HOME] = Field(default_factory=dict)
    """Held-out files, like those of train, as a table of name: path. The name (letters, digits, `.`, `_` and `-`)
    labels the file's metrics and samples. A path given without a name is named `<folder>-<file>`."""
    shuffle: bool = True
    """Shuffle the rows anew in every epoch, with the run's seed; false keeps the order of the files."""
    prompt_column: str = "prompt"
    """Column with the prompts: text, or a list of messages with role and content."""
    overlong: Literal["fail", "drop"] = "fail"
    """What to do if a row is longer than data.max_prompt_tokens (for `lockstep sft`: data.max_tokens): fail stops with
    an error; drop leaves the row out and logs how many were dropped."""
    bad_rows: Literal["fail", "drop"] = "fail"
    """What to do if a row is unusable, such as an empty prompt: fail stops with an error; drop leaves the row out and
    logs how many were dropped."""
    chat: bool = False
    """Apply the model's chat template to text, with a prompt as one user message. The template is always applied to
    lists of messages."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message to put before every row that the chat template is applied to."""
    template_date: datetime.date | None = None
    """Date to give to a chat template that writes today's date. It is fixed so that a resumed run sees the same
    rows; required by such a template."""
    add_special_tokens: bool = True
    """Let the tokenizer put its special tokens, such as BOS, before a text prompt that does not begin with them. They
    are never added to a templated prompt, because the chat template writes its own."""
    chat_template: Annotated[Path | None, AT_HOME] = None
    """Jinja file to use instead of the model's own chat template. With text prompts it needs data.chat, or an
    environment, whose messages it renders."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Extra variables to pass to the chat template, such as enable_thinking."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
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
        for name, path in value.items():  # a name becomes part of the names of metrics and files
            if not re.fullmatch(NAME, name):
                raise ValueError(
                    f"{name!r} is not a valid name: use letters, digits, '.', '_' and '-', starting with a letter or "
                    f"digit, as in {{held-out: {path}}}"
                )
        return value

    @field_validator("eval", mode="before")
    @classmethod
    def _name_paths(cls, value: object) -> object:
        entries = [value] if isinstance(value, str | Path) else value
        if not isinstance(entries, list | tuple):
            return value
        paths = [path for path in cast(Sequence[object], entries) if isinstance(path, str | Path)]
        if len(paths) < len(cast(Sequence[object], entries)):
            return value  # for pydantic to refuse
        named = {_name_of(Path(path)): path for path in paths}
        if len(named) < len(paths):
            raise ValueError("two files would get the same name: name them, as in {short: a.parquet, long: b.parquet}")
        return named


def _name_of(path: Path) -> str:
    parts = (re.sub(r"[^A-Za-z0-9._-]", "_", part) for part in (path.parent.name, path.stem))
    return "-".join(part for part in parts if part.strip(".")).lstrip("._-")


class DataConfig(FilesConfig):
    """The files of prompts to train on and to evaluate on."""

    continue_final_message: bool = False
    """Let the model continue the last message of a prompt that ends with one of the assistant (a prefill): the prompt
    ends where its text ends. By default, such a row is bad. Scorers get only what the model writes."""
    max_eval_prompts: int | None = Field(default=None, ge=1)
    """Number of rows to use from the start of each eval file; null uses all."""
    prompts_per_step: int = Field(ge=1)
    """Number of distinct prompts per step. Each gets one prompt group of rollout.completions_per_prompt samples."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Maximum prompt length in tokens, including the chat template, special tokens, and the tools and first messages of
    an environment. data.overlong says what happens to longer prompts. A run may resume with a higher limit, unless rows
    that were dropped would come back."""
    answer_column: str = "answer"
    """Column with the reference answers, or a field of one, such as reward_model.ground_truth: text, or integers, which
    scorers get as text. It may be missing, or empty in some rows, if no scorer reads it: those of kind format, length
    and model never do, judge if its template has no {answer}, code and answer unless they read another column, and the
    reward of an environment needs none."""
    extra_columns: tuple[str, ...] | None = None
    """Other columns to pass to the scorers; null passes all."""
    metrics_column: str | None = None
    """Column of text, integers or booleans with at most 50 values, such as a task or a level: the mean reward of each
    value is a metric of its own, reward[column=value], in training and in every held-out set. It must be among
    extra_columns."""

    def check_rules(self) -> None:
        wanted, column = self.extra_columns, self.metrics_column
        if column in (self.prompt_column, self.answer_column):
            raise ValueError(f"metrics_column {column} must be another column than those of prompts and answers")
        if column and wanted is not None and column not in wanted:
            raise ValueError(f"metrics_column {column} must be among extra_columns: add it there, or set that to null")
