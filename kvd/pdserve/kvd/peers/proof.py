"""How two daemons prove to each other that they are of one cluster, and where TLS comes from.

A greeting is signed under the cluster key over a nonce of the other side, so that one that was overheard is worth
nothing. Without TLS that says who opened a stream, and protects nothing on it.
"""

import os
from typing import Final

import grpc

from pdserve.kvd.peers.codec import decode_greeting, encode_greeting
from pdserve.kvd.peers.config import PeerConfig
from pdserve.kvd.peers.messages import Greeting
from pdserve.rpc.errors import ConfigError, InvalidRequest, TicketForged
from pdserve.runtime.signing import Kind, Signer

_NONCE: Final = 16


def new_nonce() -> bytes:
    """What the other side must sign over."""
    return os.urandom(_NONCE)


def sign(signer: Signer, greeting: Greeting, theirs: bytes, ours: bytes = b"") -> bytes:
    """A greeting over the other side's nonce, and with ours for its answer.

    Raises:
        InvalidRequest: what the other side sent is no nonce: with a longer one it would have words of its own signed.
    """
    if len(theirs) != _NONCE:
        raise InvalidRequest(f"a nonce of {len(theirs)} bytes, not {_NONCE}")
    return signer.sign(Kind.HELLO, theirs + encode_greeting(greeting, ours))


def check(signer: Signer, signed: bytes, ours: bytes) -> tuple[Greeting, bytes]:
    """The greeting of a peer, and what our answer must be signed over.

    Raises:
        TicketForged: not of this cluster, or not of this stream.
        InvalidRequest: not a greeting.
    """
    try:
        payload = signer.verify(Kind.HELLO, signed, 0.0)
    except TicketForged as error:
        raise TicketForged("the peer's greeting is not signed under this cluster's key") from error
    if payload[:_NONCE] != ours:
        raise TicketForged("the peer's greeting is another stream's")
    return decode_greeting(payload[_NONCE:])


class Credentials:
    """Of one daemon; read once, at its start."""

    def __init__(self, config: PeerConfig) -> None:
        """Raises ConfigError for a file that cannot be read."""
        self._tls: tuple[bytes, bytes, bytes] | None = None
        if config.tls:
            cert, key, ca = (_read(path) for path in (config.tls_cert, config.tls_key, config.tls_ca))
            self._tls = (cert, key, ca)

    def channel(self, address: str, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        """To a peer."""
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        cert, key, ca = self._tls
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Binds a server; its port.

        Raises:
            ConfigError: the address is taken, none of this host's, or the certificate is none.
        """
        try:
            if self._tls is None:
                return server.add_insecure_port(address)
            cert, key, ca = self._tls
            credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
            return server.add_secure_port(address, credentials)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"cannot bind {address} for peers: {error}") from error


def _read(path: object) -> bytes:
    try:
        with open(str(path), "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
