"""Defines the config of the scorers that call another server over HTTP: a judge model, or a scorer of your own."""

import ipaddress
import math
import re
import string
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from services.common.config.reward.scorer import BaseScorerConfig

TEMPLATE_FIELDS = ("prompt", "answer", "completion", "extra")


def parse_template(template: str) -> list[tuple[str, str | None]]:
    """Splits a template into pairs of literal text and the field that follows it, which is None after the last text.

    Fields are {prompt}, {answer}, {completion} and {extra}; literal braces are doubled. Nothing else of str.format is
    supported: no attributes, indices, conversions or format specs.

    Raises:
        ValueError: A brace is not closed, or a field is unknown.
    """
    parts: list[tuple[str, str | None]] = []
    try:
        found = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"template: {error}; write literal braces twice, as {{{{ and }}}}") from error
    for literal, field, spec, conversion in found:
        if field is not None and (field not in TEMPLATE_FIELDS or spec or conversion):
            allowed = ", ".join(f"{{{name}}}" for name in TEMPLATE_FIELDS)
            raise ValueError(
                f"template: got {{{field}}}, but a field must be just one of {allowed}; write literal braces twice"
            )
        parts.append((literal, field))
    return parts


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s\x00-\x1f]", url):
        raise ValueError(f"url {url!r} must be http://HOST... or https://HOST...")
    if "@" in parts.netloc or parts.fragment:
        raise ValueError(
            "url: must not contain credentials or a #fragment; put a key in a file and name it with api_key_file"
        )
    _ = parts.port  # raises ValueError if it is not a valid port
    return url


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RemoteConfig(BaseScorerConfig):
    """Holds the keys that all scorers on another server have."""

    url: Annotated[str, AfterValidator(_check_url)]
    """URL of the server, http or https. Redirects are not followed."""
    api_key_file: str | None = Field(default=None, min_length=1)
    """File on the reward service's host with an API key, which is sent as a bearer token: over https, or over http to
    loopback only."""
    timeout_s: float | None = Field(default=None, gt=0, le=3600)
    """Time limit in seconds for one score (kind http: one prompt group) including retries, counted from when its first
    request may be sent; null uses reward.timeout_s."""
    max_retries: int = Field(default=4, ge=0, le=20)
    """Maximum number of retries after a temporary failure, with exponential backoff from 0.5 s to 30 s."""
    requests_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Maximum number of requests per second, including retries; null is no limit. Each reward replica has its own
    limit."""
    max_concurrent: int = Field(default=16, ge=1, le=1024)
    """Maximum number of scores (kind http: prompt groups) in progress. Others wait, and their timeout_s starts only
    when the wait ends."""

    @model_validator(mode="after")
    def _key_is_not_sent_in_clear(self) -> Self:
        parts = urlsplit(self.url)
        if self.api_key_file and parts.scheme != "https" and not _is_loopback(parts.hostname or ""):
            raise ValueError("api_key_file: the key would be sent unencrypted; use an https url")
        return self


class JudgeConfig(RemoteConfig):
    """Asks a language model behind an OpenAI-compatible chat-completions URL to read the sample and write its score."""

    kind: Literal["judge"] = "judge"
    """Ask a language model behind an OpenAI-compatible chat-completions URL for the score."""
    model: str = Field(min_length=1)
    """Name of the judge model on the server."""
    template: str
    """Message to the judge, with the fields {prompt}, {answer}, {completion} and {extra} (as JSON). Write literal
    braces twice."""
    score_pattern: str
    """Python regular expression whose last match in the judge's answer gives the score: the text of its first group,
    which must be a number."""
    scale: float = Field(default=1.0, allow_inf_nan=False)
    """Factor to multiply the judge's number by: 0.1 maps 0..10 to 0..1."""
    score_range: tuple[float, float] | None = None
    """Smallest and largest number that the judge may write, before `scale`. It is asked again for any other, which is
    never a score. null is 0 to 1/scale with a scale between 0 and 1 (0.1: 0 to 10), else any number."""
    temperature: float | None = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of the judge; null uses the server's default."""
    max_tokens: int | None = Field(default=1024, ge=1)
    """Maximum tokens of the judge's answer; null uses the server's default."""
    request_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Time limit in seconds for one request; a request that takes longer is retried."""

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
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
        return self

    @property
    def limits(self) -> tuple[float, float]:
        """Returns the smallest and the largest number that the judge may write."""
        if self.score_range is None:
            return (0.0, round(1 / self.scale, 9)) if 0 < self.scale < 1 else (-math.inf, math.inf)
        return self.score_range


class HttpConfig(RemoteConfig):
    """Calls a scorer at a URL of yours: one POST per prompt group, as services/reward/scorers/model.py describes."""

    kind: Literal["http"] = "http"
    """Send each prompt group as one POST to a scorer of your own."""
