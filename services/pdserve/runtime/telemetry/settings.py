"""What OpenTelemetry's standard environment variables say of the export of traces. Pure.

    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else OTEL_EXPORTER_OTLP_ENDPOINT     where to; without: nowhere
    OTEL_SDK_DISABLED                                                        true: nowhere either
    OTEL_TRACES_EXPORTER                                                     otlp, or none: nowhere either
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, else OTEL_EXPORTER_OTLP_PROTOCOL     grpc
    OTEL_TRACES_SAMPLER                                                      which traces are kept: SAMPLERS
    OTEL_TRACES_SAMPLER_ARG                                                  share of traces, 0 to 1

A value that is not spoken here is an error. The exporter itself reads the others (headers, insecure, certificates,
timeout, compression).
"""

import math
from collections.abc import Mapping
from typing import Final

from pdserve.rpc.errors import ConfigError

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
DISABLED: Final = "OTEL_SDK_DISABLED"
EXPORTER: Final = "OTEL_TRACES_EXPORTER"
SAMPLER: Final = "OTEL_TRACES_SAMPLER"
RATIO: Final = "OTEL_TRACES_SAMPLER_ARG"

_SHARES: Final[Mapping[str, float | None]] = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}
"""None: the argument says it, 1 without."""
SAMPLERS: Final = {parent + name: share for parent in ("", "parentbased_") for name, share in _SHARES.items()}
"""Share that each keeps of the traces that begin here. Of a trace that a caller began, the caller's flag decides under
each of them, which is what `parentbased_` means."""


def endpoint(environ: Mapping[str, str]) -> str:
    """Where traces go; empty: nowhere, and then nothing is built for them.

    Raises:
        ConfigError: another exporter than OTLP's is asked for or, where traces go somewhere, another protocol than
            gRPC.
    """
    if _said(environ, DISABLED).lower() == "true":
        return ""
    exporter = _said(environ, EXPORTER).lower()
    if exporter == "none":
        return ""
    if exporter not in ("", "otlp"):
        raise ConfigError(f"{EXPORTER} is {_said(environ, EXPORTER)!r}; only otlp is spoken here, or none")
    _, where = _first(environ, ENDPOINTS)
    name, protocol = _first(environ, PROTOCOLS)
    if where and protocol.lower() not in ("", "grpc"):
        raise ConfigError(f"{name} is {protocol!r}; only grpc is spoken here, by default at port 4317 of a collector")
    return where


def ratio(environ: Mapping[str, str]) -> float | None:
    """Share of traces that are kept of those that begin here; None where it is not said.

    Raises:
        ConfigError: no sampler of SAMPLERS, not a number from 0 to 1, or a number for a sampler that takes none.
    """
    said, sampler = _said(environ, RATIO), _said(environ, SAMPLER).lower()
    if sampler and sampler not in SAMPLERS:
        raise ConfigError(f"{SAMPLER} is {_said(environ, SAMPLER)!r}, none of {', '.join(SAMPLERS)}")
    fixed = SAMPLERS.get(sampler)
    if fixed is not None:
        if said:
            raise ConfigError(f"{RATIO} is {said!r}, but {SAMPLER}={sampler} takes none")
        return fixed
    if not said:
        return 1.0 if sampler else None
    try:
        share = float(said)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError(f"{RATIO} is {said!r}, not a number from 0 to 1")
    return share


def _said(environ: Mapping[str, str], name: str) -> str:
    """Empty means unset, as the standard has it."""
    return environ.get(name, "").strip()


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    """The first of these that says something, and what; empty: none does."""
    return next(((name, said) for name in names if (said := _said(environ, name))), ("", ""))
