"""OpenTelemetry's variables: each is honoured or refused by name, none is passed over."""

import itertools

import pytest

from pdserve.cli import up
from pdserve.rpc.errors import ConfigError
from pdserve.runtime.telemetry import settings

WHERE = "http://c:4317"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": WHERE}
GENERAL, OF_TRACES = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


@pytest.mark.parametrize(
    ("exporter", "where"), [("none", ""), (" None ", ""), ("otlp", WHERE), ("OTLP", WHERE), ("", WHERE)]
)
def test_the_exporter_that_is_asked_for(exporter: str, where: str) -> None:
    """OTLP's is what there is; with none traces go nowhere, whatever the endpoint."""
    assert settings.endpoint(ENDPOINT | {settings.EXPORTER: exporter}) == where


@pytest.mark.parametrize("exporter", ["console", "zipkin", "otlp,console", "nowhere"])
@pytest.mark.parametrize("around", [{}, ENDPOINT])
def test_another_exporter_is_refused(exporter: str, around: dict[str, str]) -> None:
    """By the variable's name and value, also without an endpoint: it would not have needed one."""
    with pytest.raises(ConfigError, match=f"OTEL_TRACES_EXPORTER is '{exporter}'.*only otlp"):
        settings.endpoint(around | {settings.EXPORTER: exporter})


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({GENERAL: "grpc"}, ""),
        ({GENERAL: "GRPC"}, ""),
        ({GENERAL: "http/protobuf"}, GENERAL),
        ({OF_TRACES: "http/json"}, OF_TRACES),
        ({GENERAL: "http/protobuf", OF_TRACES: "grpc"}, ""),
        ({GENERAL: "grpc", OF_TRACES: "http/protobuf"}, OF_TRACES),
        ({GENERAL: "http/protobuf", OF_TRACES: " "}, GENERAL),
    ],
)
def test_only_grpc_is_spoken(said: dict[str, str], refused: str) -> None:
    """Any other protocol is refused and not spoken in gRPC's place; the more exact variable decides."""
    if not refused:
        assert settings.endpoint(ENDPOINT | said) == WHERE
        return
    with pytest.raises(ConfigError, match=f"{refused} is '{said[refused]}'; only grpc is spoken"):
        settings.endpoint(ENDPOINT | said)


@pytest.mark.parametrize("off", [{settings.DISABLED: "true"}, {settings.EXPORTER: "none"}])
def test_what_is_switched_off_speaks_no_protocol(off: dict[str, str]) -> None:
    """Nothing is sent, so nothing is refused; nor where there is no endpoint."""
    assert settings.endpoint(ENDPOINT | {GENERAL: "http/protobuf"} | off) == ""
    assert settings.endpoint({GENERAL: "http/protobuf"}) == ""


@pytest.mark.parametrize(
    ("sampler", "argument", "share"),
    [
        ("always_on", "", 1.0),
        ("always_off", "", 0.0),
        ("traceidratio", "", 1.0),
        ("traceidratio", "0.25", 0.25),
        (" TraceIdRatio ", "0.25", 0.25),
        ("", "0.25", 0.25),
        ("", "", None),
    ],
)
@pytest.mark.parametrize("parent", ["", "parentbased_"])
def test_the_sampler_that_is_asked_for(parent: str, sampler: str, argument: str, share: float | None) -> None:
    """The share of those that begin here; the argument is the ratio's, as it is without a sampler."""
    name = parent + sampler.strip() if sampler else ""
    assert settings.ratio({settings.SAMPLER: name, settings.RATIO: argument}) == share


@pytest.mark.parametrize("sampler", ["jaeger_remote", "parentbased_jaeger_remote", "xray", "on"])
def test_another_sampler_is_refused(sampler: str) -> None:
    """By its name, and all that are known are named."""
    with pytest.raises(ConfigError, match=f"OTEL_TRACES_SAMPLER is '{sampler}'.*parentbased_traceidratio"):
        settings.ratio({settings.SAMPLER: sampler})


@pytest.mark.parametrize("argument", ["0.25", "half"])
@pytest.mark.parametrize("sampler", ["always_on", "parentbased_always_off"])
def test_an_argument_that_the_sampler_does_not_take(sampler: str, argument: str) -> None:
    """Who gives one expects it to count."""
    with pytest.raises(ConfigError, match=f"OTEL_TRACES_SAMPLER_ARG is '{argument}', but .*{sampler} takes none"):
        settings.ratio({settings.SAMPLER: sampler, settings.RATIO: argument})


def test_up_and_the_proxy_read_the_variables_alike() -> None:
    """`pdserve up` starts no store just where the proxy would send elsewhere, or is told to send nowhere."""
    choices = {
        settings.DISABLED: ("", "true", "false"),
        settings.EXPORTER: ("", "otlp", "none", "NONE"),
        settings.ENDPOINTS[0]: ("", "http://t:4317"),
        settings.ENDPOINTS[1]: ("", WHERE),
    }
    for values in itertools.product(*choices.values()):
        environ = dict(zip(choices, values, strict=True))
        off = environ[settings.DISABLED] == "true" or environ[settings.EXPORTER].lower() == "none"
        assert bool(up.traces_go_to(environ)) == (off or bool(settings.endpoint(environ))), environ
