"""Connects a client to one service, with the newest certificate, and explains why a connection is refused."""

import asyncio
import contextlib
import logging
import os
import resource
import ssl
import time
from collections.abc import Sequence

import grpc

from services.common.errors import MAX_HEADER_BYTES, Unauthenticated, Unavailable
from services.common.rpc.tls import CERTIFICATE_FILE, KEY_FILE, Credentials, Transport

log = logging.getLogger(__name__)

# Interval and time limit of attempts to find out why there is no connection, while waiting for one.
_EXPLAIN_S = 5.0
# Time without a log message. By then, a service that was started together with this process is up; for any other
# service, somebody may have to act.
_PATIENCE_S = 30.0


class Channel:
    """A stub of one service. After the certificate is renewed, new calls get a stub on a new channel.

    Calls in progress keep their stub and with it the old channel, which gRPC closes when its last reference is gone.
    """

    def __init__(self, address: str, stub: type, transport: Transport, options: Sequence[tuple[str, int | str]]):
        self._address, self._make_stub, self._tls, self._name = address, stub, transport.tls, transport.name
        self._options = [*options, ("grpc.ssl_target_name_override", self._name)] if self._name else options
        self._identity = self._tls and self._tls.current()
        self._last_refusal = ""
        self._open()

    def stub(self) -> object:
        """Returns the stub for a new call. The caller must keep a reference to it until the call has ended."""
        if self._tls is not None and (identity := self._tls.current()) is not self._identity:
            self._identity = identity
            self._open()
        return self._stub

    async def connect(self, timeout_s: float, *, target: str) -> float:
        """Waits until the service is reachable; returns what remains of `timeout_s`.

        gRPC's own wait cannot tell a service that is not up yet from one that will never accept this client.

        Raises:
            Unauthenticated: The service is reachable, but client or service rejects the other's certificate.
            Unavailable: There was no connection within `timeout_s`. The message starts with `target` and says how the
                last attempt ended.
        """
        self.stub()
        begin = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_ready(self._channel, f"{target}: no connection yet, waiting up to {timeout_s:g} s")
        except TimeoutError as error:
            why = self._last_refusal or "no answer"
            raise Unavailable(f"{target}: no connection within {timeout_s:g} s: {why}") from error
        return max(0.0, begin + timeout_s - time.monotonic())

    async def explain(self) -> str:
        """Returns why there is no connection, or "" if one succeeds; see `require_mutual_trust`."""
        return await require_mutual_trust(self._address, self._tls, self._name)

    async def close(self) -> None:
        await self._channel.close()

    async def _until_ready(self, channel: grpc.aio.Channel, news: str) -> None:
        said, begin = "", time.monotonic()
        while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            # gRPC retries by itself, but reports nothing until it succeeds.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXPLAIN_S):
                    await channel.wait_for_state_change(state)
            if channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                self._last_refusal = await self.explain()
                if time.monotonic() - begin > _PATIENCE_S and self._last_refusal != said:
                    said = self._last_refusal
                    log.warning("%s: %s", news, said)

    def _open(self) -> None:
        if (identity := self._identity) is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=self._options)
        else:
            credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
            self._channel = grpc.aio.secure_channel(self._address, credentials, options=self._options)
        self._stub = self._make_stub(self._channel)


async def require_mutual_trust(address: str, tls: Credentials | None, name: str = "") -> str:
    """Returns "" if the service at `address` and this client accept each other, or the error if it is unreachable.

    The service's certificate must be valid for `name`; by default, for the host of `address`.

    Raises:
        Unauthenticated: One of them rejects the other. The message says why and what to do.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        context = _context(tls)
    except OSError as error:  # includes SSLError: the files are being replaced, and gRPC keeps the previous ones
        return f"the certificate in {tls and tls.directory} cannot be used now: {error}"
    try:
        async with asyncio.timeout(_EXPLAIN_S):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name or host)
            with contextlib.closing(writer):
                # The service sends first. With TLS 1.3, only this read shows whether it accepts the client's
                # certificate.
                why = await _refusal(reader)
        if tls is None:
            why = "the service requires mTLS: pass --tls with a certificate"
    except ssl.SSLError as error:
        why = _tls_problem(error, name or host) if tls else ""
    except OSError as error:  # includes unknown names, and timeouts, which have no message
        return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    if why:
        raise Unauthenticated(f"{address}: {why}", address=address)
    return ""


async def _refusal(reader: asyncio.StreamReader) -> str:
    try:
        if await reader.read(1):
            return ""
        what = "it closed the connection"
    except (ssl.SSLError, ConnectionError) as error:
        what = getattr(error, "reason", None) or str(error)
    return (
        f"the service refuses this certificate ({what}): if it expired, renew it (`lockstep certs renew`); otherwise "
        "check that both hosts have the same ca.pem"
    )


def _context(tls: Credentials | None) -> ssl.SSLContext:
    if tls is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent or trusted
    else:
        context = ssl.create_default_context(cadata=tls.current().ca.decode())
        context.load_cert_chain(tls.directory / CERTIFICATE_FILE, tls.directory / KEY_FILE)
    context.set_alpn_protocols(["h2"])
    return context


def _tls_problem(error: ssl.SSLError, host: str) -> str:
    if not isinstance(error, ssl.SSLCertVerificationError):
        return f"the TLS handshake failed ({error.reason}): is the service started with --tls?"
    if "mismatch" in error.verify_message:
        return (
            f"the certificate of the service is not valid for {host!r} ({error.verify_message}): call the service by "
            f"a name in its certificate, or issue a new one with `lockstep certs issue ... --host {host}`"
        )
    return (
        f"the certificate of the service is refused ({error.verify_message}): if it expired, renew it there (`lockstep "
        "certs renew`); otherwise check that both hosts have the same ca.pem"
    )


# Frames are 1 to 2 MiB, but a sample is one frame: with the experts of 94 layers, 350,000 tokens have 256 MiB.
MAX_MESSAGE_BYTES = 256 << 20
# A silent peer is pinged after the first time, and given up if it does not answer within the second. A host that
# vanished is thus noticed within 20 s, even during a long call.
SILENCE_MS, ANSWER_MS = 8_000, 10_000
# A connection must have finished its TLS and HTTP/2 handshakes by then. gRPC's default is 120 s.
HANDSHAKE_MS = 20_000
# Maximum number of connections to one service. A run needs one or two.
_MAX_CONNECTIONS = 4096


def keepalive(silence_ms: int, answer_ms: int) -> list[tuple[str, int]]:
    """Returns the options with which a silent peer is noticed after `silence_ms` + `answer_ms`, on either end."""
    return [
        ("grpc.keepalive_time_ms", silence_ms),
        # Seen with gRPC 1.85: keepalive_timeout_ms only sets TCP_USER_TIMEOUT, which ends connections whose peer
        # acknowledges nothing that was sent. It is the ping's own timeout that ends one whose ping is not answered.
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", silence_ms // 2),
    ]


OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_HEADER_BYTES),
    *keepalive(SILENCE_MS, ANSWER_MS),
    # A service that starts is found within a second. gRPC would wait up to two minutes between its attempts.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),  # of the environment; gRPC would use it for loopback too
    ("grpc.so_reuseport", 0),  # a second server must not share the port and get half of the connections
]


def max_connections() -> int:
    """Returns how many connections a port may have, so that half of this process's descriptors stay free."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(descriptors // 2, _MAX_CONNECTIONS)


def server_options() -> list[tuple[str, int]]:
    """Returns OPTIONS and a limit on connections."""
    return [
        *OPTIONS,
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", max_connections()),
    ]
