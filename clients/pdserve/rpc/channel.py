"""gRPC channels with pdserve's options: a dead peer is found within 8 s, and one that is back within about one."""

from collections.abc import Sequence

import grpc

Options = Sequence[tuple[str, int]]

CHANNEL_OPTIONS: Options = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # What keepalive's timeout is for: without it a connection that swallows pings is given up only after a minute.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)

CLIENT_OPTIONS: Options = (
    *CHANNEL_OPTIONS,
    # gRPC dials a peer that was away after pauses that grow to two minutes; one that is back should be found soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

SERVER_OPTIONS: Options = (
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 4_000),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, never shared in silence
)


def aio_channel(target: str) -> grpc.aio.Channel:
    """An asyncio channel without TLS to `host:port` or `unix:path`."""
    return grpc.aio.insecure_channel(target, options=list(CLIENT_OPTIONS))


def sync_channel(target: str) -> grpc.Channel:
    """A blocking channel without TLS to `host:port` or `unix:path`."""
    return grpc.insecure_channel(target, options=list(CLIENT_OPTIONS))
