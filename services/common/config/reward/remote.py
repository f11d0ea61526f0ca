"""Scorers that ask another server over HTTP: a language model as judge, or a scorer of yours."""

import ipaddress
import re
import string
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from services.common.config.reward.scorer import BaseScorerConfig

TEMPLATE_FIELDS = ("prompt", "answer", "completion", "extra")


def parse_template(template: str) -> list[tuple[str, str | None]]:
    """Pairs of literal text and the name of the field after it, None after the last.

    Fields are {prompt}, {answer}, {completion} and {extra}, braces of the text itself are doubled. Nothing else of
    str.format is understood: no attributes, indices, conversions or format specs.

    Raises:
        ValueError: A brace is not closed, or a field is another one.
    """
    parts: list[tuple[str, str | None]] = []
    try:
        found = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"template: {error}; braces of the text itself are doubled") from error
    for literal, field, spec, conversion in found:
        if field is not None and (field not in TEMPLATE_FIELDS or spec or conversion):
            allowed = ", ".join(f"{{{name}}}" for name in TEMPLATE_FIELDS)
            raise ValueError(f"template: a field is one of {allowed}, and other braces are doubled; got {{{field}}}")
        parts.append((literal, field))
    return parts


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s\x00-\x1f]", url):
        raise ValueError(f"url {url!r} must be http://HOST... or https://HOST...")
    if "@" in parts.netloc or parts.fragment:
        raise ValueError("url: no credentials and no #fragment; a key belongs in the file that api_key_file names")
    _ = parts.port  # raises ValueError, if it is not a port
    return url


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RemoteConfig(BaseScorerConfig):
    """What the scorers have that ask a server."""

    url: Annotated[str, AfterValidator(_check_url)]
    """http or https. Redirects are not followed."""
    api_key_file: str | None = Field(default=None, min_length=1)
    """File on the reward service's machine whose text is sent as bearer token; with http, only to loopback."""
    timeout_s: float | None = Field(default=None, gt=0, le=3600)
    """Most seconds for one score with its retries, from when its first request may go; reward.timeout_s if unset."""
    max_retries: int = Field(default=4, ge=0, le=20)
    """Further tries after a failure that may pass, with exponential backoff from 0.5 s to 30 s."""
    requests_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Most requests that start per second, retries too; no limit if unset. Each replica of the service has its own."""
    max_concurrent: int = Field(default=16, ge=1, le=1024)
    """Most scores in progress at once; others wait, and their timeout_s with them."""

    @model_validator(mode="after")
    def _key_is_not_sent_in_clear(self) -> Self:
        parts = urlsplit(self.url)
        if self.api_key_file and parts.scheme != "https" and not _is_loopback(parts.hostname or ""):
            raise ValueError("api_key_file: the key would be sent in clear; use an https url")
        return self


class JudgeConfig(RemoteConfig):
    """A language model behind an OpenAI-compatible chat-completions URL reads the sample and writes its score."""

    kind: Literal["judge"] = "judge"
    """Asks a language model."""
    model: str = Field(min_length=1)
    """Its name, as the server knows it."""
    template: str
    """Message to it, with fields {prompt}, {answer}, {completion} and {extra} (as JSON); other braces are doubled."""
    score_pattern: str
    """Python regular expression; the first group of its last match in the judge's answer is the number."""
    scale: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of that number: 0.1 makes 0..10 to 0..1."""
    temperature: float | None = Field(default=0.0, ge=0, le=2)
    """Of the judge's sampling; null leaves it to the server."""
    max_tokens: int | None = Field(default=1024, ge=1)
    """Most tokens of its answer; null leaves it to the server."""
    request_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Most seconds for one request, which is then tried again."""

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        if "completion" not in [field for _, field in parse_template(self.template)]:
            raise ValueError("template: must have the field {completion}, or every sample would be judged alike")
        try:
            num_groups = re.compile(self.score_pattern, re.DOTALL).groups
        except re.error as error:
            raise ValueError(f"score_pattern {self.score_pattern!r} is not a regular expression: {error}") from error
        if not num_groups:
            raise ValueError("score_pattern: must have a group around the number, such as Score: ([0-9]+)")
        return self


class HttpConfig(RemoteConfig):
    """A scorer behind a URL of yours: one POST for each prompt group; contract in services/reward/scorers/http.py."""

    kind: Literal["http"] = "http"
    """Asks a scorer over HTTP."""
