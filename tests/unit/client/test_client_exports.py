"""What the SDK promises by name and by weight."""

import inspect
import subprocess
import sys

import pdserve.client
from pdserve.client import AsyncClient, AsyncStream, Client, Stream
from pdserve.rpc import errors

CALLS = ["AsyncClient", "AsyncStream", "CallFields", "Client", "Retry", "Stream"]
INTO_A_CALL = ["FailurePolicy", "Message", "Mode", "Route", "Sampling"]
OUT_OF_A_CALL = ["Choice", "Completion", "Delta", "Engine", "FinishReason", "Model", "PositionLogprobs", "Role"]
OUT_OF_A_CALL += ["Timings", "TokenLogprob", "Topology", "Transfer", "Usage"]


def test_public_names() -> None:
    """The public names are these and every error class; adding or removing one is a decision."""
    known = [*CALLS, *INTO_A_CALL, *OUT_OF_A_CALL, *(kind.__name__ for kind in errors.BY_REASON.values())]
    assert sorted(pdserve.client.__all__) == sorted(known)
    for name in pdserve.client.__all__:
        assert getattr(pdserve.client, name) is not None


def test_both_clients_offer_the_same_calls() -> None:
    """Each public method of one client exists on the other with the same parameters (`close` is `aclose`)."""

    def calls(kind: type) -> dict[str, list[str]]:
        return {
            "close" if name == "aclose" else name: list(inspect.signature(member).parameters)
            for name, member in vars(kind).items()
            if callable(member) and not name.startswith("_")
        }

    assert calls(Client) == calls(AsyncClient)
    assert calls(Stream) == calls(AsyncStream)


def test_importing_the_client_stays_light() -> None:
    """The SDK needs grpcio and protobuf only: nothing heavy is even imported."""
    heavy = ["torch", "vllm", "zmq", "msgspec", "numpy", "structlog", "aiohttp", "tokenizers", "jinja2"]
    code = f"import sys, pdserve.client; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout.strip() == "[]"


def test_every_public_thing_says_what_it_is() -> None:
    """Each public class and each public method of the clients has a docstring."""
    for name in pdserve.client.__all__:
        thing = getattr(pdserve.client, name)
        if inspect.isclass(thing):
            assert inspect.getdoc(thing), name
            for method, member in vars(thing).items():
                if inspect.isfunction(member) and not method.startswith("_"):
                    assert inspect.getdoc(member), f"{name}.{method}"
