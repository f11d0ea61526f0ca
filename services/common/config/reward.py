"""Defines the config section `reward`: the scorers, their weights, and the treatment of samples without a score."""

import ipaddress
import math
import re
import string
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from services.common.config.base import NAME, Strict, Table
from services.common.import_path import IMPORT_PATH, ITEM_FIELDS


class BaseScorerConfig(Strict):
    """The keys that every scorer has."""

    name: str | None = Field(default=None, pattern=NAME)
    """Name of this scorer's component in results and metrics; null uses the kind. Required if a kind is used twice.
    Names of other metrics, such as mean or reward, are refused."""
    weight: float = 1.0
    """Weight of this score in the reward; 0 only records the score, and a failure to score is then only logged."""

    @property
    def component(self) -> str:
        return self.name or str(getattr(self, "kind"))  # noqa: B009 every scorer config declares its own `kind`


class CodeConfig(BaseScorerConfig):
    """services/reward/graders/code.py has the forms of tests. `timeout_s`, `num_workers` and `max_memory_gib` of the
    section `reward` are not for this scorer."""

    kind: Literal["code"] = "code"
    """Run the completion's Python program against tests, in a sandbox (needs bubblewrap). The score is 1 if all tests
    pass, else 0."""
    file: str = ""
    """With an agent: the collected file with the program, such as solution.py; without that file the score is 0. By
    default, the program is in the completion."""
    tests_key: str | None = "tests"
    """Dataset column with the tests, which must be among data.extra_columns; null reads the tests from the answer."""
    partial: bool = False
    """Score the fraction of tests passed. With false all tests must pass, and testing stops at the first failure."""
    require_fence: bool = False
    """Score 0 if the completion has no fenced Python block. With false, a completion without any fence is run as a
    whole."""
    float_tolerance: float = Field(default=1e-6, ge=0)
    """Relative or absolute tolerance for numbers in a program's results, where the expected number is not an integer;
    0 requires exact equality. It does not apply to assert statements."""
    timeout_s: float = Field(default=5.0, gt=0, le=3600)
    """Time limit of one test, in seconds of wall-clock time."""
    program_timeout_s: float = Field(default=30.0, gt=0, le=86400)
    """Time limit of all tests of one program together, in seconds of wall-clock time; the tests that it does not reach
    count as failed. reward.group_timeout_s can make it shorter."""
    max_concurrent: int = Field(default=2, ge=1, le=1024)
    """Maximum number of programs that run concurrently. If it exceeds the number of cores, programs slow each other
    down and may time out."""
    max_memory_gib: float = Field(default=1.0, ge=0.125, le=1 << 20)
    """Maximum address space of one process, in GiB. The Python interpreter itself takes about 0.04 GiB."""
    max_processes: int = Field(default=16, ge=1, le=1024)
    """Maximum number of processes and threads of one program. A program can take up to this many times max_memory_gib
    of memory."""
    max_disk_mib: int = Field(default=64, ge=1, le=65536)
    """Size of a program's /tmp in MiB. It is in memory and also holds the test's input."""
    max_output_mib: float = Field(default=1.0, gt=0, le=64)
    """Maximum output of one test in MiB; a test with more output fails."""


class ModelConfig(BaseScorerConfig):
    kind: Literal["model"] = "model"
    """Score with a reward model (a Hugging Face sequence-classification model). Install the extra `reward-model`."""
    path: str = Field(min_length=1)
    """Model directory on the reward service's host, with config.json, tokenizer and safetensors weights. Code in the
    directory is never run."""
    label: int | None = Field(default=None, ge=0)
    """Index of the label whose logit is the score; required unless the model has exactly one label."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """Text that the model reads. chat: the row's messages, and the completion (the last turn of an episode) as an
    assistant message in the reward model's chat template; a prompt that is no chat, or to which an environment added
    messages, is one user message. plain: prompt + completion. auto: chat if the reward model has a chat template, else
    plain."""
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
    max_position_embeddings, in models like RoBERTa without the positions up to that of padding."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Time limit in seconds for one prompt group, from when the worker takes it. On a timeout the worker is killed and
    loads the model again."""
    start_timeout_s: float = Field(default=540.0, gt=0, le=3600)
    """Time limit in seconds for loading the model. The coordinator waits for at most timeouts.open_s in all."""


TEMPLATE_FIELDS = ("prompt", "answer", "completion", "extra")


def parse_template(template: str) -> list[tuple[str, str | None]]:
    """Splits a template into pairs of literal text and the field that follows it, which is None after the last text.

    Fields are {prompt}, {answer}, {completion} and {extra}; literal braces are doubled. Nothing else of str.format is
    supported: no attributes, indices, conversions or format specs.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"template: {error}; write literal braces twice, as {{{{ and }}}}") from error
    for _, field, spec, conversion in pieces:
        if field is not None and (field not in TEMPLATE_FIELDS or spec or conversion):
            allowed = ", ".join(f"{{{name}}}" for name in TEMPLATE_FIELDS)
            raise ValueError(
                f"template: got {{{field}}}, but a field must be just one of {allowed}; write literal braces twice"
            )
    return [(literal, field) for literal, field, _, _ in pieces]


def check_url(url: str) -> str:
    """Returns a URL as it is. Raises ValueError if it is not one of HTTP, or has credentials in it."""
    parts = urlsplit(url)  # leaves out tabs and line breaks, so that another URL than this one would be checked
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s\x00-\x1f]", url):
        shown = url.partition("?")[0].rpartition("@")[2]  # without what may be a key
        raise ValueError(f"url {shown!r} must be http://HOST... or https://HOST...")
    if "@" in parts.netloc or parts.fragment:
        raise ValueError(
            "url: must not contain credentials or a #fragment; a key belongs in a file that api_key_file names"
        )
    try:
        _ = parts.port
    except ValueError:
        raise ValueError("url: its port is no number from 0 to 65535") from None  # it might be a key
    return url


def is_local(host: str) -> bool:
    """Returns whether a host is named as one of loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_encrypted(url: str, field: str = "api_key_file") -> None:
    """Raises ValueError, which names `field`, if a key that is sent to a URL would cross a network as it is."""
    parts = urlsplit(url)
    if parts.scheme != "https" and not is_local(parts.hostname or ""):
        raise ValueError(f"{field}: the key would be sent unencrypted; use an https url")


class RemoteConfig(BaseScorerConfig):
    """The keys that all scorers on another server have."""

    url: Annotated[str, AfterValidator(check_url)]
    """URL of the server, http or https. Redirects are not followed, and HTTP_PROXY is not used."""
    api_key_file: str | None = Field(default=None, min_length=1)
    """File on the reward service's host with an API key, which is sent as a bearer token: over https, or over http to
    loopback only."""
    timeout_s: float | None = Field(default=None, gt=0, le=3600)
    """Time limit in seconds for one score (kind http: one prompt group) including retries, counted from when its first
    request may be sent; null uses reward.timeout_s."""
    max_retries: int = Field(default=4, ge=0, le=20)
    """Maximum number of retries after a temporary failure, with exponential backoff from 0.5 s to 30 s."""
    requests_per_s: float | None = Field(default=None, gt=0)
    """Maximum number of requests per second of each reward replica, including retries; null is no limit."""
    max_concurrent: int = Field(default=16, ge=1, le=1024)
    """Maximum number of scores (kind http: prompt groups) in progress. Others wait, and their timeout_s starts only
    when the wait ends."""

    def check_rules(self) -> None:
        if self.api_key_file:
            check_encrypted(self.url)


class JudgeConfig(RemoteConfig):
    kind: Literal["judge"] = "judge"
    """Ask a language model behind an OpenAI-compatible URL, such as https://HOST/v1/chat/completions, for the score."""
    model: str = Field(min_length=1)
    """Name of the judge model on the server."""
    template: str
    """Message to the judge, with the fields {prompt}, {answer}, {completion} and {extra} (as JSON). Write literal
    braces twice."""
    score_pattern: str
    """Python regular expression whose last match in the judge's answer gives the score: the text of its first group,
    which must be a number."""
    scale: float = 1.0
    """Factor to multiply the judge's number by: 0.1 maps 0..10 to 0..1."""
    score_range: tuple[float, float] | None = None
    """Smallest and largest number that the judge may write, before `scale`. It is asked again for any other, which is
    never a score. null is 0 to 1/scale with a scale between 0 and 1 (0.1: 0 to 10), else any number."""
    temperature: float | None = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of the judge; null uses the server's default."""
    max_tokens: int | None = Field(default=1024, ge=1)
    """Maximum tokens of the judge's answer; null uses the server's default."""
    extra_body: Table = Field(default_factory=dict)
    """More keys of the request, such as {chat_template_kwargs: {enable_thinking: false}} or {reasoning_effort: low}."""
    request_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Time limit in seconds for one request; a request that takes longer is retried."""

    def check_rules(self) -> None:
        super().check_rules()
        path = urlsplit(self.url).path
        if not path or path.rstrip("/").endswith("/v1"):  # a path of / is meant
            url = self.url.partition("?")[0].rstrip("/") + ("" if path else "/v1")
            raise ValueError(f"url: must be that of chat completions itself: {url}/chat/completions")
        if ours := {"model", "messages", "temperature", "max_tokens", "stream", "n"} & self.extra_body.keys():
            raise ValueError(f"extra_body: must not have {min(ours)}, which Lockstep sets by itself")
        if "completion" not in [field for _, field in parse_template(self.template)]:
            raise ValueError("template: must have the field {completion}; without it all samples look the same")
        try:
            num_groups = re.compile(self.score_pattern, re.DOTALL).groups
        except re.error as error:
            raise ValueError(f"score_pattern {self.score_pattern!r} is not a regular expression: {error}") from error
        if self.score_range is not None and not self.score_range[0] < self.score_range[1]:
            raise ValueError(f"score_range {list(self.score_range)}: the first number must be the smaller one")
        if not num_groups:
            raise ValueError("score_pattern: must have a group around the number, such as Score: ([0-9]+)")

    @property
    def limits(self) -> tuple[float, float]:
        if self.score_range is None:
            return (0.0, round(1 / self.scale, 9)) if 0 < self.scale < 1 else (-math.inf, math.inf)
        return self.score_range


class HttpConfig(RemoteConfig):
    """One POST per prompt group, as services/reward/scorers/model.py describes."""

    kind: Literal["http"] = "http"
    """Send each prompt group as one POST to a scorer of your own."""


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
    """Score 0 if the completion has no ####. With false, the number in the completion's last \\boxed{} is used instead,
    or else its last number."""


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
    """Function to call, as package.module:function, which returns a number. It gets prompt, answer, extra, completion,
    num_tokens and finish_reason by name; one with completions, completion_ids or solution_str gets TRL's or verl's."""
    kwargs: Table = Field(default_factory=dict)
    """Additional keyword arguments for the function."""
    group: bool = False
    """Call the function once per prompt group, as a function written for TRL always is, instead of once per sample:
    each argument is then a list with one element per sample, and the function returns a list of numbers."""
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
