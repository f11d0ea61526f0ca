"""Posts JSON to one URL for scorers on other servers, with rate limit, deadline and retries. Answers are untrusted."""

import asyncio
import email.utils
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from services.common.config.reward import RemoteConfig
from services.common.errors import counted
from services.common.files import open_plain_file
from services.common.tasks import backoff_s
from services.reward.errors import FailureReason, ScoringError

MAX_RESPONSE_BYTES = 4 << 20
_MAX_KEY_BYTES = 64 << 10
_MAX_DETAIL_BYTES = 300
_MIN_KEY_CHARS = 8  # of one that is hidden; x or null, for a server that reads none, may be in any answer
_MAY_PASS = frozenset({408, 429})  # Request Timeout and Too Many Requests
Reader = Callable[[object], Awaitable[object]]


class MayPassError(Exception):
    """A failure that a retry may fix. `error` is raised if no retries are left."""

    def __init__(self, error: ScoringError, retry_after_s: float = 0.0):
        super().__init__(str(error))
        self.error, self.retry_after_s = error, retry_after_s


class Remote:
    """Posts to `config.url`. Connection failures and the statuses 408, 429 and 5xx are retried.

    Args:
        config: Has the URL, key file and limits.
        timeout_s: Time limit for one `post` including retries, from when its first request may be sent.
        request_timeout_s: Time limit for one request, which is then retried. None for no limit except `timeout_s`.
        context: Says which certificates of servers are trusted, other than the system's.
    """

    def __init__(
        self,
        config: RemoteConfig,
        timeout_s: float,
        *,
        request_timeout_s: float | None = None,
        context: ssl.SSLContext | None = None,
    ):
        self._config, self._timeout_s, self._request_timeout_s = config, timeout_s, request_timeout_s
        self._context = context
        self._host = urlsplit(config.url).netloc
        self._key = self._secret = ""
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._next_request_at = 0.0

    async def open(self) -> None:
        """Reads the key and sends nothing. Raises ScoringError if the key cannot be read."""
        if self._config.api_key_file:
            self._key = await asyncio.to_thread(read_key, Path(self._config.api_key_file))
            self._secret = self._key if len(self._key) >= _MIN_KEY_CHARS else ""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._session = aiohttp.ClientSession(
            headers=headers | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            connector=aiohttp.TCPConnector(ssl=self._context or True, limit=0),  # max_concurrent limits it
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a small answer must not decompress to a huge one
            trust_env=False,
        )

    async def post(self, message: Mapping[str, object], read: Reader | None = None) -> Any:
        """Posts `message` and returns what `read` makes of the JSON answer; it may raise MayPassError to ask again.

        Waiting for the rate limits does not count against `timeout_s`.

        Raises:
            ScoringError: TIMEOUT after `timeout_s` or if the last request timed out, else ERROR.
        """
        payload, failed = json.dumps(message).encode(), list[ScoringError]()
        async with self._slots:
            await self._wait_for_turn()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._post_with_retries(payload, read, failed)
            except TimeoutError:
                late = f"no score within {self._timeout_s:g} s (timeout_s)"
        if failed:
            last = failed[-1].detail.removeprefix(f"{self._host}: ")
            late += f"; the last of {counted(len(failed), 'failed request')}: {last}"
        raise self._error(late, FailureReason.TIMEOUT)

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def _post_with_retries(self, payload: bytes, read: Reader | None, failed: list[ScoringError]) -> object:
        for num_retries in range(self._config.max_retries + 1):
            try:
                answer = await self._request(payload)
                return await read(answer) if read else answer
            except MayPassError as failure:
                failed.append(failure.error)
                if num_retries == self._config.max_retries:
                    raise failure.error from None
                await asyncio.sleep(max(backoff_s(num_retries), failure.retry_after_s))
                await self._wait_for_turn()

    async def _request(self, payload: bytes) -> object:
        assert self._session, "open made it"
        try:
            async with asyncio.timeout(self._request_timeout_s):
                async with self._session.post(self._config.url, data=payload, allow_redirects=False) as response:
                    return await self._read(response)
        except TimeoutError:
            late = f"no answer within {self._request_timeout_s} s (request_timeout_s)"
            raise MayPassError(self._error(late, FailureReason.TIMEOUT)) from None
        except aiohttp.ClientError as error:
            raise MayPassError(self._error(f"{type(error).__name__}: {error}")) from None

    async def _read(self, response: aiohttp.ClientResponse) -> object:
        if response.status != 200:
            body = self._hide_key(await _read_body(response, _MAX_DETAIL_BYTES))
            detail = body.decode(errors="replace")[:_MAX_DETAIL_BYTES]
            if to := response.headers.get("Location", "").partition("?")[0]:
                detail = f"redirects are not followed, and this one leads to {to}: {detail}"
            error = self._error(f"status {response.status}: {detail}")
            if response.status >= 500 or response.status in _MAY_PASS:
                raise MayPassError(error, _retry_after_s(response.headers.get("Retry-After", "")))
            raise error
        body = await _read_body(response, MAX_RESPONSE_BYTES)
        if len(body) > MAX_RESPONSE_BYTES:
            raise self._error(f"an answer of more than {MAX_RESPONSE_BYTES} bytes")
        body = self._hide_key(body)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            why = f"{error}: {body.decode(errors='replace')!r:.100}"
            if encoding := response.headers.get("Content-Encoding"):
                why = f"compressed ({encoding}), which was not asked for"
            raise self._error(f"not JSON: {why}") from None

    def _hide_key(self, body: bytes) -> bytes:
        """Returns a body without the key: servers often quote one that they reject."""
        return body.replace(self._secret.encode(), b"***") if self._secret else body

    async def _wait_for_turn(self) -> None:
        if self._config.requests_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        begin = max(now, self._next_request_at)
        self._next_request_at = begin + 1 / self._config.requests_per_s
        await asyncio.sleep(begin - now)

    def _error(self, detail: str, reason: FailureReason = FailureReason.ERROR) -> ScoringError:
        detail = detail.replace(self._secret, "***") if self._secret else detail
        return ScoringError(reason, f"{self._host}: {detail}")


async def _read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Returns the body; a longer one is cut somewhere after `max_bytes`."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            response.close()
            break
    return bytes(body)


def read_key(path: Path) -> str:
    """Returns the key in a file. Raises ScoringError if there is none."""
    try:
        with open_plain_file(path) as file:
            key = file.read(_MAX_KEY_BYTES).decode("ascii").strip()
    except (OSError, ValueError) as error:
        # Do not show a decoding error, because it quotes the key.
        what = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ScoringError(FailureReason.ERROR, f"api_key_file {path}: {what}") from None
    if not key or not key.isprintable() or " " in key:
        raise ScoringError(FailureReason.ERROR, f"api_key_file {path}: must contain one key and nothing else")
    return key


def _retry_after_s(header: str) -> float:
    """Returns the seconds that a Retry-After header asks for, as a number or a date (RFC 9110, 10.2.3); else 0."""
    if header.isdecimal():
        return float(header[:10])
    try:
        return email.utils.parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
