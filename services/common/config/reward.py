"""Defines the config section `reward`: the scorers, their weights, and the treatment of samples without a score."""

import re
from typing import Annotated, Literal

from pydantic import Field

from services.common.config.base import Strict, Table
from services.common.config.scorers import (
    ITEM_FIELDS,
    BaseScorerConfig,
    CodeConfig,
    HttpConfig,
    JudgeConfig,
    ModelConfig,
    parse_template,
)
from services.common.import_path import IMPORT_PATH


class ExactConfig(BaseScorerConfig):
    kind: Literal["exact"] = "exact"
    """Score 1 if completion and answer are the same text, else 0. Leading and trailing whitespace is ignored, and how
    Unicode composes characters (NFC)."""
    ignore_case: bool = False
    """Ignore case when comparing."""


_COLUMN_KEYS = ("answers_key", "tests_key")
"""Keys of scorers that name a further column of the rows."""


class AnswerConfig(BaseScorerConfig):
    kind: Literal["answer"] = "answer"
    """Score 1 if the text between the completion's last <answer> and </answer> is an accepted answer, else 0. Case,
    white space, the punctuation of sentences and an article before a word are ignored, as in SQuAD's exact match; but
    signs, points in numbers, symbols and an answer such as A are not."""
    answers_key: str | None = None
    """Dataset column with the list of accepted answers, which must be among data.extra_columns. By default, only the
    answer itself is accepted."""


class Gsm8kConfig(BaseScorerConfig):
    kind: Literal["gsm8k"] = "gsm8k"
    """Score 1 if the number after the completion's last #### equals the answer's, else 0. A heading of Markdown
    (#### Conclusion, #### Step 2: ...) is no marker, and an exponent, an index or a name such as CO2 is no number."""
    require_marker: bool = False
    """Score 0 if the completion has no ####. With false, the completion's last number is used instead."""


class MathConfig(BaseScorerConfig):
    kind: Literal["math"] = "math"
    """Score 1 if math-verify finds the completion's last boxed answer equal to the dataset's answer, else 0."""
    require_boxed: bool = False
    """Score 0 if the completion has no \\boxed{}. With false, the last <answer>, or the last formula or number
    near the end, is used instead."""


class FormatConfig(BaseScorerConfig):
    kind: Literal["format"] = "format"
    """Score 1 if the whole completion matches `pattern`, else 0."""
    pattern: str
    """Python regular expression that the whole completion must match; `.` also matches line breaks."""

    def check_rules(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from error


class LengthConfig(BaseScorerConfig):
    kind: Literal["length"] = "length"
    """Penalize long completions (DAPO's soft overlong penalty, arXiv 2503.14476, eq. 13): the score is 0 up to
    target_tokens and falls linearly to -1 at max_tokens."""
    target_tokens: int = Field(ge=0)
    """Number of tokens up to which the score is 0."""
    max_tokens: int = Field(ge=1)
    """Number of tokens from which on the score is -1."""

    def check_rules(self) -> None:
        if self.max_tokens <= self.target_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} must be above target_tokens {self.target_tokens}")


class PythonConfig(BaseScorerConfig):
    kind: Literal["python"] = "python"
    """Call your own function, sync or async, which must be importable on the reward service."""
    path: str = Field(pattern=IMPORT_PATH)
    """Function to call, as package.module:function. It gets the keyword arguments prompt, answer, extra, completion,
    num_tokens and finish_reason, and returns a number."""
    kwargs: Table = Field(default_factory=dict)
    """Additional keyword arguments for the function."""
    group: bool = False
    """Call the function once per prompt group instead of once per sample: each argument is then a list with one element
    per sample, and the function returns a list of numbers."""
    max_concurrent: int = Field(default=64, ge=1, le=65536)
    """Maximum number of calls of an async function that run at the same time, in all workers together. A function that
    is not async has one call at a time in each worker."""

    def check_rules(self) -> None:
        taken = sorted(set(self.kwargs) & set(ITEM_FIELDS))
        if taken:
            raise ValueError(f"kwargs {', '.join(taken)}: already passed by the service; use other names")


ScorerConfig = Annotated[
    ExactConfig
    | AnswerConfig
    | Gsm8kConfig
    | MathConfig
    | FormatConfig
    | LengthConfig
    | PythonConfig
    | JudgeConfig
    | HttpConfig
    | ModelConfig
    | CodeConfig,
    Field(discriminator="kind"),
]

METRICS_OF_REWARDS = ("mean", "std", "mixed_groups", "reward", "tokens_mean", "truncated", "failed")
"""Metrics of a batch (reward/<name>) or of a held-out set (eval/<set>/<name>) beside those of the scorers."""


class RewardConfig(Strict):
    """The reward of a sample: the weighted sum of its scores."""

    scorers: tuple[ScorerConfig, ...] = ()
    """List of scorers, each with its kind. The reward of a sample is the weighted sum of their scores. At least one is
    needed, unless the run has an environment, which gives rewards too. In an episode, scorers see only the text of the
    last turn."""
    timeout_s: float = Field(default=5.0, gt=0, le=3600)
    """Time limit in seconds for one sample (for one group, if the scorer takes groups), from when a worker process
    takes it. On a timeout the worker is killed and replaced; the sample has no score, except for kind math, where an
    answer that takes forever is wrong. If a worker dies, the sample is scored once more."""
    group_timeout_s: float = Field(default=240.0, gt=0, le=86400)
    """Time limit in seconds for a math or code scorer's work on one prompt group, not counting the time that it waits
    for its turn. Each sample may take an equal share (with 16 samples of which 2 run at once, an eighth of this),
    unless its other limits are lower. Must be below timeouts.score_s."""
    num_workers: int = Field(default=2, ge=1, le=1024)
    """Number of worker processes of each math, format and python scorer. A math scorer has one more, which replaces a
    killed one at once."""
    max_memory_gib: float = Field(default=4.0, gt=0.1, le=1 << 20)
    """Maximum address space of one worker, in GiB. A scorer that imports CUDA libraries needs far more address space
    than memory."""
    on_failure: Literal["zero", "drop_group", "fail"] = "drop_group"
    """What to do if a sample could not be scored. zero: its reward is 0; drop_group: its prompt group is left out of
    the batch; fail: the run fails."""

    @property
    def reads_answers(self) -> bool:
        return any(map(_reads_answer, self.scorers))

    def check_rules(self) -> None:
        names = [scorer.component for scorer in self.scorers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"scorers: {', '.join(twice)} is used twice; give each scorer a different `name`")
        if taken := sorted(set(names) & set(METRICS_OF_REWARDS)):
            raise ValueError(f"scorers: the name {taken[0]} is taken by another metric; give the scorer another `name`")

    @property
    def columns_read(self) -> list[tuple[str, str]]:
        """The keys of scorers that name a further column of the rows, each with the column."""
        scorers = [scorer for scorer in self.scorers if scorer.weight]  # failures of others are only logged
        keys = [(one.component, key, getattr(one, key, None)) for one in scorers for key in _COLUMN_KEYS]
        return [(f"reward.scorers[{name}].{key}", column) for name, key, column in keys if column is not None]


def _reads_answer(scorer: ScorerConfig) -> bool:
    match scorer:
        case FormatConfig() | LengthConfig() | ModelConfig():
            return False
        case AnswerConfig():
            return scorer.answers_key is None
        case CodeConfig():
            return scorer.tests_key is None
        case JudgeConfig():
            return "answer" in [field for _, field in parse_template(scorer.template)]
        case _:
            return True
