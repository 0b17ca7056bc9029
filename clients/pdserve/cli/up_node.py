"""A deployment over several nodes: what `pdserve up` on one of them is told of itself and of the others.

node a: kvd, engines, proxy      pdserve up --host A --cluster-key-file KEY ...
node b: kvd, engines             pdserve up --host B --cluster-key-file KEY --proxy A:50050 ...
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from pdserve.cli import options
from pdserve.rpc.errors import ConfigError

PING_PORT, PEER_PORT = 50051, 50052
_WILD = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, slots=True)
class Node:
    """One of several nodes. All of them have the same key and the same ping port."""

    host: str
    """Address of this node, as the others reach it: its proxy, engines and kvd listen there."""
    key_file: Path
    """The cluster key."""
    proxy: str = ""
    """gRPC address of the proxy, `host:port`, where another node has it; empty: it is here."""
    ping_port: int = PING_PORT
    """Where engines register, on the proxy's host."""
    insecure: bool = False
    """kvds of different nodes talk in clear."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        if self.host.strip("[]") in _WILD or not self.host:
            raise ConfigError(f"--host {self.host!r} is no address that other nodes can call: name one of this node")
        if not 0 < self.ping_port < 65536:
            raise ConfigError(f"--ping-port {self.ping_port} is not in 1..65535")
        if self.proxy:
            self.registration()

    def registration(self) -> str:
        """`host:port` at which this node's engines register with the other node's proxy.

        Raises:
            ConfigError: the proxy's address is none.
        """
        host, colon, port = self.proxy.rpartition(":")
        if not colon or not host.strip("[]") or not port.isdecimal():
            raise ConfigError(f"--proxy {self.proxy!r} is not HOST:PORT, the gRPC address of a proxy")
        return at(host, self.ping_port)

    def kvd_flags(self) -> list[str]:
        """What kvd needs to have peers; its settings come behind and are the last word."""
        flags = ["--transport=nixl", f"--peer-listen={at(self.host, PEER_PORT)}"]
        return [*flags, "--insecure"] if self.insecure else flags


def at(host: str, port: int) -> str:
    """`host:port`, with brackets round IPv6."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def binds(node: Node | None) -> tuple[Path | None, str, int]:
    """The cluster key, the host that its services bind, and the port that must be free there; None: a fresh key,
    0: any port."""
    if node is None:
        return None, "127.0.0.1", 0
    return node.key_file, node.host, 0 if node.proxy else node.ping_port


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what makes it one of several nodes."""
    group = parser.add_argument_group(
        "one of several nodes",
        f"kvd listens for those of other nodes at port {PEER_PORT}, and reads over nixl; "
        "--kvd peer-listen=HOST:PORT, --kvd transport=NAME and --kvd peer-tls-cert=FILE (-key, -ca) say otherwise.",
    )
    group.add_argument("--host", metavar="HOST", help="this node's address, as the others reach it")
    group.add_argument("--cluster-key-file", type=Path, metavar="FILE", help="the key that all nodes have")
    group.add_argument("--proxy", metavar="HOST:PORT", help="gRPC address of the proxy on another node: none is here")
    port = f"where engines register, on every node the same; default {PING_PORT}"
    group.add_argument("--ping-port", type=options.port, metavar="P", help=port)
    group.add_argument("--insecure", action="store_true", help="kvds talk without TLS")


def of(args: argparse.Namespace) -> Node | None:
    """The node that the flags tell of; None: the deployment is on this machine alone.

    Raises:
        ConfigError: flags that do not go together, or values that cannot work.
    """
    given = {
        "--cluster-key-file": args.cluster_key_file,
        "--proxy": args.proxy,
        "--ping-port": args.ping_port,
        "--insecure": args.insecure,
    }
    if args.host is None:
        for flag, value in given.items():
            if value:
                raise ConfigError(f"{flag} is for one of several nodes: give --host, its own address, too")
        return None
    if args.cluster_key_file is None:
        raise ConfigError("several nodes share a key: give all of them the same --cluster-key-file")
    if args.proxy and (useless := _of_a_proxy_here(args)):
        it, are = ("it", "is") if len(useless) == 1 else ("them", "are")
        raise ConfigError(f"{', '.join(useless)} {are} the proxy's: give {it} on the node that has it")
    return Node(
        args.host,
        args.cluster_key_file,
        args.proxy or "",
        PING_PORT if args.ping_port is None else args.ping_port,
        args.insecure,
    )


def _of_a_proxy_here(args: argparse.Namespace) -> list[str]:
    """The flags that were given and are for a proxy that is started here, or for what is started with it."""
    given = {
        "--mode": bool(args.mode),
        "--on-failure": bool(args.on_failure),
        "--hold-timeout": args.hold_timeout is not None,
        "--grpc-port": args.grpc_port is not None,
        "--http-port": args.http_port is not None,
        "--traces-port": args.traces_port is not None,
        "--no-traces": args.no_traces,
    }
    return [flag for flag, told in given.items() if told]
