"""`pdserve trace`: one request's way to its first token as a waterfall in the terminal, or a list of the last ones."""

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Any

from pdserve.cli import options
from pdserve.rpc.errors import ConfigError, DeadlinePassed, InvalidRequest, Unavailable

Json = dict[str, Any]
_INSTEAD = "name a trace store with --traces URL"
_EXPORT = 2.0
"""Seconds within which the proxy's export of a request that has just ended has come to the store."""
_POLL = 0.1
"""Seconds between two looks for it."""
_ON_ITS_WAY = 0.5
"""Seconds that the newest trace is given to come. A proxy keeps one for 0.35 s at most (0.1 s until it is drawn, 0.25 s
until it is sent), so that those of requests that ended before `--last` was asked are in the store by then, unless the
machine is overloaded."""
_MOST = 10_000
"""Requests that one answer of the store has at most."""
_NAMED = 20
"""Of those that an id may mean, as many are listed."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds which request, and which trace store to ask."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("id", nargs="?", help="of the request or of the trace, or its first 8 digits or more")
    which.add_argument(
        "--last",
        nargs="?",
        type=_last,
        const=0,
        metavar="N",
        help=f"the newest request; with N, a list of up to {_MOST}",
    )
    parser.add_argument("--whole", action="store_true", help="bars up to the last token, not only to the first")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--traces", metavar="URL", help="of a trace store, as http://127.0.0.1:16686; default: what runs, or ran last"
    )
    where.add_argument("--state-dir", type=Path, metavar="FOLDER", help="of the `pdserve up` to ask about")
    parser.add_argument("--timeout", type=options.seconds, default=10.0, metavar="S", help="seconds; default 10")


def run(args: argparse.Namespace) -> int:
    """Asks and prints."""
    if args.last and args.whole:
        raise ConfigError("--whole is of one request's bars, and --last N is a list: leave one of them out")
    from pdserve.cli import waterfall

    with _store(args) as store:
        style = waterfall.Style.of(sys.stdout, shutil.get_terminal_size().columns)
        if args.last:
            found = _newest(store, args.last)
            print(json.dumps(found, indent=2) if args.json else waterfall.listing(found))
            return 0
        trace = store.get(f"trace/{_trace_id(store, args.id)}", "spans")
        if args.json:
            print(json.dumps(trace, indent=2))
        else:
            print("\n".join(waterfall.picture(trace, style, whole=args.whole)))
    return 0


@contextlib.contextmanager
def _store(args: argparse.Namespace) -> Iterator["TraceStore"]:
    """The store that is named; else the running deployment's; else, for this moment, one on what was kept."""
    from pdserve.cli import deployment, kept

    where = args.state_dir or deployment.default_dir()
    if args.traces or (record := deployment.running(where)) is not None:
        yield TraceStore(str(args.traces).rstrip("/") if args.traces else _address(record, where), args.timeout)
    elif (found := kept.newest(args.state_dir)) is not None:
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.until))
        print(f"no deployment runs: these are the traces of what ran until {until}", file=sys.stderr)
        with kept.served(found.file) as address:
            yield TraceStore(address, args.timeout, grows=False)
    else:
        deployment.find(where, _INSTEAD)  # says that none runs
        raise ConfigError(f"a deployment has just started in {where}: try again")


def _trace_id(store: "TraceStore", wanted: str | None) -> str:
    """The trace of the request that is meant; the newest one's if none is named."""
    found = _exported(store, wanted) if wanted else _newest(store, 1)
    if not found:
        raise InvalidRequest(f"no request {wanted!r} is in the trace store" if wanted else "no request has been traced")
    traces = {str(row["trace_id"]): None for row in found}
    if len(traces) > 1:
        from pdserve.cli import waterfall

        raise InvalidRequest(
            f"{wanted!r} may be any of these: say more of it\n{waterfall.listing(found, whole_ids=True)}"
        )
    return next(iter(traces))


def _newest(store: "TraceStore", limit: int) -> list[Json]:
    """The newest requests, with those whose traces were still on their way."""
    store.requests(limit=1)  # one that does not answer is said at once
    if store.grows:
        time.sleep(_ON_ITS_WAY)
    return store.requests(limit=limit)


def _exported(store: "TraceStore", wanted: str) -> list[Json]:
    """Requests that this may name; none only if none has come within _EXPORT."""
    until = time.monotonic() + _EXPORT
    while not (found := store.requests(limit=_NAMED, id=wanted)) and store.grows and time.monotonic() < until:
        time.sleep(_POLL)
    return found


def _last(text: str) -> int:
    """How many are listed, for argparse."""
    value = options.count(text)
    if value > _MOST:
        raise argparse.ArgumentTypeError(f"{value} is more than the {_MOST} that are listed at once")
    return value


def _address(record: Any, where: Path) -> str:
    """Of a running deployment's trace store.

    Raises:
        ConfigError: it has none, or none any more.
    """
    if not record.traces:
        if record.traces_go:
            raise ConfigError(f"this deployment's traces go to {record.traces_go}: look there, or {_INSTEAD}")
        raise ConfigError(f"this deployment keeps no traces (--no-traces): {_INSTEAD}")
    if record.processes and "traces" not in record.processes:
        raise ConfigError(f"the trace store of this deployment has ended for good: see {where / 'logs' / 'traces.log'}")
    return str(record.traces)


class TraceStore:
    """A trace store's own API."""

    def __init__(self, address: str, timeout: float, *, grows: bool = True) -> None:
        """`timeout`: seconds per answer. `grows`: traces may still be on their way to it."""
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"{address!r} is no address of a trace store, as http://127.0.0.1:16686")
        self.grows = grows
        self._address = address
        self._timeout = timeout

    def requests(self, **query: Any) -> list[Json]:
        """The newest requests.

        Raises:
            PdserveError: as `get`.
        """
        from urllib.parse import urlencode

        found: list[Json] = self.get(f"requests?{urlencode(query)}", "requests")["requests"]
        return found

    def get(self, what: str, wants: str) -> Json:
        """One answer, which must have the field `wants`.

        Raises:
            Unavailable: nobody answers there, or somebody else.
            InvalidRequest: it refuses.
            DeadlinePassed: it does not answer in time.
        """
        from urllib.error import HTTPError
        from urllib.request import ProxyHandler, build_opener

        url = f"{self._address}/api/pdserve/{what}"
        try:
            # The store is on this machine or named by the user: no proxy of the environment is in between.
            with build_opener(ProxyHandler({})).open(url, timeout=self._timeout) as answer:
                body = json.load(answer)
        except HTTPError as error:
            raise InvalidRequest(f"{url}: {_said(error.read(4096)) or error.reason}") from error
        except TimeoutError as error:
            raise DeadlinePassed(f"{url} has not answered within {self._timeout:g} s") from error
        except InvalidURL as error:
            raise ConfigError(f"{self._address!r} is no address of a trace store: {error}") from error
        except HTTPException as error:
            raise Unavailable(f"what answers at {self._address} speaks no HTTP, so it is no trace store") from error
        except OSError as error:  # URLError too
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise DeadlinePassed(f"{url} has not answered within {self._timeout:g} s") from error
            raise Unavailable(f"no trace store answers at {self._address}: {reason}") from error
        except ValueError as error:
            raise Unavailable(f"what answers at {self._address} is no trace store of pdserve") from error
        if not isinstance(body, dict) or wants not in body:
            raise Unavailable(f"what answers at {self._address} is no trace store of pdserve")
        return body


def _said(body: bytes) -> str:
    """The reason in an error's body; empty where there is none."""
    try:
        return str(json.loads(body)["errors"][0]["msg"])
    except (ValueError, LookupError, TypeError):
        return ""
