"""Asks one service of this container whether it is ready: status 0 where it says so, 1 with a reason where not.

health.py unix:/run/pdserve/kvd.sock      grpc.health.v1 of the whole server
health.py 127.0.0.1:9001                  the same over TCP
health.py http://127.0.0.1:8000/health    any 200

An engine asks every few seconds, so it costs as little as Python can: importing gRPC takes half a second of CPU time,
and this, run with `python3 -I -S`, a twentieth. One call of gRPC without it is four HTTP/2 frames out and a scan of
those that come back.
"""

import http.client
import socket
import struct
import sys
import urllib.parse

TIMEOUT_S = 2.0
"""Of each wait; the engine's own timeout is longer."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _GOAWAY = 0x0, 0x1, 0x4, 0x7
_END_STREAM, _END_HEADERS = 0x1, 0x4
_SERVING = b"\0\0\0\0\x02\x08\x01"
"""A gRPC message, not compressed, of two bytes: HealthCheckResponse(status=SERVING)."""
_FIELDS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/grpc.health.v1.Health/Check"),
    (b":authority", b"localhost"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def request() -> bytes:
    """All that is sent. Header fields are literals that no table remembers: 0, then each with its length."""
    fields = b"".join(b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in _FIELDS)
    settings, call = frame(_SETTINGS, 0, 0), frame(_HEADERS, _END_HEADERS, 1, fields)
    return _PREFACE + settings + call + frame(_DATA, _END_STREAM, 1, b"\0\0\0\0\0")


def _exactly(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        piece = connection.recv(size - len(got))
        if not piece:
            raise ConnectionError("the connection ended before an answer")
        got += piece
    return got


def grpc_serves(target: str) -> str:
    """Why the server at a target does not serve; empty: it does."""
    unix = target.startswith("unix:")
    with socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        host, _, port = target.rpartition(":")
        connection.connect(target.removeprefix("unix:") if unix else (host, int(port)))
        connection.sendall(request())
        while True:
            head = _exactly(connection, 9)
            size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            payload = _exactly(connection, size)
            if kind == _DATA:
                return "" if payload == _SERVING else f"it is not serving: {payload.hex()}"
            if kind == _GOAWAY or (kind == _HEADERS and flags & _END_STREAM):
                return "it refused the call"


def http_serves(url: str) -> str:
    """Why a GET is not answered with 200; empty: it is."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    connection.request("GET", parts.path or "/")
    response = connection.getresponse()
    return "" if response.status == 200 else f"{response.status}: {response.read(400).decode(errors='replace')}"


def main(argv: list[str]) -> int:
    """Exit status."""
    target = argv[0]
    try:
        why = http_serves(target) if target.startswith("http://") else grpc_serves(target)
    except OSError as error:
        why = str(error)
    if why:
        sys.stderr.write(f"{target}: {why}\n")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
