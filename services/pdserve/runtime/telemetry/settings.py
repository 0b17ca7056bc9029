"""What OpenTelemetry's standard environment variables say of the export of traces. Pure.

    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else OTEL_EXPORTER_OTLP_ENDPOINT     where to; without: nowhere
    OTEL_SDK_DISABLED                                                        true: nowhere either
    OTEL_TRACES_SAMPLER_ARG                                                  share of traces, 0 to 1

The exporter itself reads the others (headers, insecure, certificates, timeout, compression).
"""

import math
from collections.abc import Mapping

from pdserve.rpc.errors import ConfigError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
DISABLED = "OTEL_SDK_DISABLED"
RATIO = "OTEL_TRACES_SAMPLER_ARG"


def endpoint(environ: Mapping[str, str]) -> str:
    """Where traces go; empty: nowhere, and then nothing is built for them."""
    if environ.get(DISABLED, "").strip().lower() == "true":
        return ""
    return next((where for name in ENDPOINTS if (where := environ.get(name, "").strip())), "")


def ratio(environ: Mapping[str, str]) -> float | None:
    """Share of traces that are kept; None where it is not said.

    Raises:
        ConfigError: not a number from 0 to 1.
    """
    said = environ.get(RATIO, "").strip()
    if not said:
        return None
    try:
        share = float(said)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError(f"{RATIO} is {said!r}, not a number from 0 to 1")
    return share
