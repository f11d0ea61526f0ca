"""The client's end of one service's connection: made with the newest certificate, and open about why it is refused."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Sequence
from typing import Any

import grpc

from services.common.errors import Unauthenticated
from services.common.tls import CERTIFICATE_FILE, KEY_FILE, Credentials

# A handshake that only finds out why another one failed.
_EXPLAIN_S = 5.0


class Channel:
    """A stub of one service. After the certificate was renewed, later calls get a stub on a new channel.

    A call in progress keeps its stub, and with it the former channel, which gRPC closes with the last reference to it.
    """

    def __init__(self, address: str, stub: type, tls: Credentials | None, options: Sequence[tuple[str, Any]]):
        self._address, self._make_stub, self._tls, self._options = address, stub, tls, options
        self._identity = tls and tls.current()
        self._open()

    def stub(self) -> Any:
        """The stub for a new call. The caller holds on to it until the call has ended."""
        if self._tls is not None and self._tls.current() is not self._identity:
            self._identity = self._tls.current()
            self._open()
        return self._stub

    async def connect(self, timeout_s: float) -> float:
        """With mTLS, waits for the service to be there; what is left of `timeout_s`.

        gRPC's own wait does not tell a service that is not there yet from one that will never accept this end.

        Raises:
            Unauthenticated: It is there, and one end refuses the other's certificate.
        """
        if self._tls is None:
            return timeout_s
        self.stub()
        begin = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_ready(self._channel)
        except TimeoutError:
            await self.explain()
        return max(0.0, begin + timeout_s - time.monotonic())

    async def _until_ready(self, channel: grpc.aio.Channel) -> None:
        while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
            if channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await self.explain()

    async def explain(self) -> None:
        """Returns if the service accepts this certificate and this end its, or if it is not there.

        Raises:
            Unauthenticated: One end refuses the other; says why and what to do.
        """
        if self._tls is None:
            return
        host, _, port = self._address.rpartition(":")
        try:
            async with asyncio.timeout(_EXPLAIN_S):
                context = _context(self._tls)
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
                with contextlib.closing(writer):
                    await reader.read(1)  # only here does TLS 1.3 say that the client's certificate is refused
        except ssl.SSLError as error:
            raise Unauthenticated(f"{self._address}: {_why(error, host)}", address=self._address) from error
        except (OSError, TimeoutError):
            return

    async def close(self) -> None:
        """Ends it together with its calls."""
        await self._channel.close()

    def _open(self) -> None:
        if self._identity is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=self._options)
        else:
            identity = self._identity
            credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
            self._channel = grpc.aio.secure_channel(self._address, credentials, options=self._options)
        self._stub = self._make_stub(self._channel)


def _context(tls: Credentials) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=tls.current().ca.decode())
    context.load_cert_chain(tls.directory / CERTIFICATE_FILE, tls.directory / KEY_FILE)
    context.set_alpn_protocols(["h2"])
    return context


def _why(error: ssl.SSLError, host: str) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        what = error.verify_message
        if "mismatch" in what:
            return (
                f"the certificate of the service is not for {host!r} ({what}): call it by a name that it has, or "
                f"issue it another with `lockstep certs issue ... --host {host}`"
            )
        return (
            f"the certificate of the service is refused: {what}; renew it there (`lockstep certs renew`), and see "
            "that both ends have the same ca.pem"
        )
    if "ALERT" in (error.reason or ""):
        return (
            f"the service refuses this certificate: {error.reason}; renew it (`lockstep certs renew`), and see that "
            "both ends have the same ca.pem"
        )
    return f"the TLS handshake failed ({error.reason}): is the service started with --tls?"
