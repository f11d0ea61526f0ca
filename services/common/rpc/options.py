"""Defines the gRPC options that every client and server uses."""

from services.common.errors import MAX_HEADER_BYTES

# Frames are 1 to 2 MiB; one prompt group of long samples can be larger.
MAX_MESSAGE_BYTES = 64 << 20

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_HEADER_BYTES),
    # Detect within 20 s that a peer's host has vanished, even during a long call.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]
