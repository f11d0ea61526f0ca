"""Defines the gRPC options that every client and server uses."""

import resource

from services.common.errors import MAX_HEADER_BYTES

# Frames are 1 to 2 MiB; one prompt group of long samples can be larger.
MAX_MESSAGE_BYTES = 64 << 20
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
    ("grpc.so_reuseport", 0),
]


def server_options() -> list[tuple[str, int]]:
    """Returns OPTIONS and a limit on connections, so that half of this process's descriptors stay free."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        *OPTIONS,
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", min(descriptors // 2, _MAX_CONNECTIONS)),
    ]
