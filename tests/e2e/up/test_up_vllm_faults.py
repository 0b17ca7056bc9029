"""What goes wrong in front of `pdserve up --engine vllm` is said by name, and holds no block afterwards.

One deployment for all tests of this file: a prefill and a decode engine, whose context is so long that a whole answer
takes far longer than any test waits.
"""

import json
import os
import random
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.client import PdserveError
from pdserve.rpc.status import to_error

if TYPE_CHECKING:
    from tests.e2e.up.conftest import Attend, Fleet

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]  # the first test starts the engines

Words = Callable[[int], str]
POOL_BLOCKS, CONTEXT = 130, 4096
LONG = 3700
"""Tokens of an answer that nobody waits for: it takes more than 15 s."""
AT_ONCE_S = 10.0
"""Longest time until every engine has said that it is idle; they speak once a second. A lease would last 30 s."""
MODES = ("read", "write")


@pytest.fixture(scope="module")
def fleet(attend: "Attend") -> "Iterator[Fleet]":
    """Still running when the tests end, or ended by the last of them."""
    with attend(POOL_BLOCKS, CONTEXT, ("--restarts", "0")) as fleet:
        yield fleet


def post(fleet: "Fleet", body: bytes) -> tuple[int, dict[str, Any]]:
    """Status and body of a completion request over HTTP."""
    request = urllib.request.Request(f"{fleet.at.http}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def refusal(fleet: "Fleet", message: bytes) -> PdserveError:
    """The error that the gRPC face gives for these bytes of a GenerateRequest."""
    generate = fleet.public.unary_stream(
        "/pdserve.api.serving.v1.Inference/Generate",
        request_serializer=bytes,
        response_deserializer=serving_pb2.GenerateResponse.FromString,
    )
    with pytest.raises(grpc.RpcError) as raised:
        list(generate(message, timeout=30.0))
    return to_error(raised.value)


ROWS: dict[str, tuple[dict[str, Any], str, int]] = {
    "an unknown model": ({"model": "gpt"}, "UNKNOWN_MODEL", 404),
    "a prompt longer than the context": ({"prompt": [7] * (CONTEXT + 1)}, "CONTEXT_LENGTH_EXCEEDED", 400),
    "a prompt that fills the context": ({"prompt": [7] * CONTEXT}, "CONTEXT_LENGTH_EXCEEDED", 400),
    "a prompt longer than either pool": ({"prompt": [7] * (33 * POOL_BLOCKS)}, "CONTEXT_LENGTH_EXCEEDED", 400),
    "an empty text": ({"prompt": ""}, "EMPTY_PROMPT", 400),
    "no token": ({"prompt": []}, "EMPTY_PROMPT", 400),
    "a token outside the vocabulary": ({"prompt": [1, 512]}, "INVALID_REQUEST", 400),
    "negative max_tokens": ({"max_tokens": -1}, "INVALID_REQUEST", 400),
    "zero max_tokens": ({"max_tokens": 0}, "INVALID_REQUEST", 400),
    "huge max_tokens": ({"max_tokens": 4_000_000_000}, "CONTEXT_LENGTH_EXCEEDED", 400),
    "more than any integer": ({"max_tokens": 2**70}, "INVALID_REQUEST", 400),
    "an unknown field": ({"max_token": 4}, "UNKNOWN_FIELD", 400),
    "a route that is not there": ({"route": "colocated"}, "NO_ENGINES", 503),
}


@pytest.mark.parametrize(("fields", "reason", "status"), ROWS.values(), ids=ROWS)
def test_both_faces_refuse_alike(fleet: "Fleet", fields: dict[str, Any], reason: str, status: int) -> None:
    """The SDK's error has the reason that HTTP's body has, and every block is free."""
    asked: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "temperature": 0.0} | fields
    body = {name: value for name, value in asked.items() if name != "route"}
    if "route" in asked:
        body["pdserve"] = {"route": asked["route"]}
    with ThreadPoolExecutor(1) as other:  # some wait for an engine to come first
        posted = other.submit(post, fleet, json.dumps(body).encode())
        with pytest.raises(PdserveError) as raised:
            fleet.sdk.generate(**asked)
        code, answer = posted.result(timeout=30.0)
    assert raised.value.reason == reason
    assert (code, answer["error"]["code"]) == (status, reason)
    assert fleet.held() == []


def test_a_pool_is_never_smaller_than_the_context(fleet: "Fleet") -> None:
    """vLLM refuses to start otherwise: this is why a prompt longer than a pool is told of the context."""
    assert all(CONTEXT <= engine.total_kv_tokens < 33 * POOL_BLOCKS for engine in fleet.topology().engines)


@pytest.mark.parametrize("data", [b"", b"{", b'{"prompt": "x"', b"\xff\xfe", b"null"])
def test_malformed_json(fleet: "Fleet", data: bytes) -> None:
    """INVALID_REQUEST, and every block is free."""
    code, answer = post(fleet, data)
    assert (code, answer["error"]["code"]) == (400, "INVALID_REQUEST")
    assert fleet.held() == []


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff\xff", "INVALID_REQUEST"),
        (b"\x1a\x02\xff\xff", "INVALID_REQUEST"),
        (b"\x1a\x01x\xba\x06\x01a", "UNKNOWN_FIELD"),
    ],
    ids=["no message", "text that is no UTF-8", "an unknown field"],
)
def test_malformed_proto(fleet: "Fleet", data: bytes, reason: str) -> None:
    """The same reasons as for JSON."""
    assert refusal(fleet, data).reason == reason
    assert fleet.held() == []


def until(holds: Callable[[], bool]) -> None:
    """Returns when it holds; an engine's numbers are as new as its last beat, a second ago at most."""
    deadline = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def asked(fleet: "Fleet", prompt: str | list[int], mode: Any) -> Any:
    """A request that nobody reads yet, as gRPC's call."""
    wire = common_pb2.TRANSFER_MODE_READ if mode == "read" else common_pb2.TRANSFER_MODE_WRITE
    request = serving_pb2.GenerateRequest(mode=wire)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    request.sampling.max_tokens = 16
    return serving_pb2_grpc.InferenceStub(fleet.public).Generate(request, timeout=30.0)


def leave_the_sdk(fleet: "Fleet", prompt: str, mode: Any) -> None:
    """The stream is closed after its first token."""
    with fleet.sdk.stream(prompt, max_tokens=LONG, temperature=0, ignore_eos=True, mode=mode) as stream:
        next(stream)


def leave_two_answers(fleet: "Fleet", prompt: str, mode: Any) -> None:
    """The same with n=2: two consumers of one prompt."""
    with fleet.sdk.stream(prompt, max_tokens=LONG, seed=1, ignore_eos=True, mode=mode, n=2) as stream:
        next(stream)


def kill_curl(fleet: "Fleet", prompt: str, mode: Any) -> None:
    """kill -9 after its first line."""
    body = {"prompt": prompt, "max_tokens": LONG, "ignore_eos": True, "stream": True, "pdserve": {"mode": mode}}
    with fleet.curl(f"{fleet.at.http}/v1/completions", "-d", json.dumps(body)) as curl:
        assert curl.stdout is not None
        assert curl.stdout.readline().startswith(b"data: {")
        curl.kill()


def leave_an_answer_in_one_piece(fleet: "Fleet", prompt: str, mode: Any) -> None:
    """curl again, which waits for the whole answer and is killed once both engines are at it."""
    body = {"prompt": prompt, "max_tokens": LONG, "ignore_eos": True, "pdserve": {"mode": mode}}
    with fleet.curl(f"{fleet.at.http}/v1/completions", "-d", json.dumps(body)) as curl:
        until(lambda: any(engine.running for engine in fleet.topology().engines if engine.role == "decode"))
        assert curl.poll() is None
        curl.kill()


def leave_while_it_computes(fleet: "Fleet", prompt: str, mode: Any) -> None:
    """Before the first token: the prompt has dozens of chunks, and the request was only just taken."""
    call = asked(fleet, random.Random(prompt).choices(range(256), k=3500), mode)
    assert next(call).WhichOneof("event") == "started"
    call.cancel()


def leave_the_queue(fleet: "Fleet", prompt: str, mode: Any) -> None:
    """Before it has an engine: two answers of another request hold decode's pool, and go on."""
    hog = random.Random(prompt).choices(range(256), k=1800)
    with fleet.sdk.stream(hog, max_tokens=2200, seed=1, ignore_eos=True, mode=mode, n=2) as holding:
        next(holding)
        call = asked(fleet, prompt, mode)
        until(lambda: fleet.topology().queued == 1)
        call.cancel()
        until(lambda: fleet.topology().queued == 0)
        next(holding)
        assert fleet.topology().in_flight == 1


def leave_while_it_waits_for_its_kv(fleet: "Fleet", prompt: str, mode: Any) -> None:
    """Decode holds blocks that kvd, which stands still, has not filled."""
    kvd = fleet.at.processes["kvd"]
    os.kill(kvd, signal.SIGSTOP)
    try:
        call = asked(fleet, prompt, mode)
        until(lambda: any(engine.waiting for engine in fleet.topology().engines if engine.role == "decode"))
        call.cancel()
        until(lambda: fleet.topology().in_flight == 0)
    finally:
        os.kill(kvd, signal.SIGCONT)


WAYS = [
    leave_the_queue,
    leave_while_it_computes,
    leave_while_it_waits_for_its_kv,
    leave_the_sdk,
    leave_two_answers,
    kill_curl,
    leave_an_answer_in_one_piece,
]
"""Waiting for engines, computing, handing over, decoding: seen by clients of every kind."""


@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_goes_away(
    fleet: "Fleet", words: Words, mode: Any, leave: "Callable[[Fleet, str, Any], None]"
) -> None:
    """Both engines stop and every block comes back at once, and the next request is served."""
    leave(fleet, words(400), mode)
    fleet.idle(within=AT_ONCE_S)
    done = fleet.sdk.generate(words(100), max_tokens=4, mode=mode)
    assert (done.mode, done.fallbacks) == (mode, 0)


def test_the_death_of_prefill_ends_the_deployment(fleet: "Fleet") -> None:
    """kill -9 without restarts, the last test of the file: `up` names the dead with the end of its log, ends with
    status 1, and leaves no process, not even vLLM's own, whose parent is the dead one."""
    pid = fleet.at.processes["prefill-0"]
    assert len(fleet.up.left(fleet.at)) > len(fleet.at.processes), "each engine has a process of vLLM's"
    os.kill(pid, signal.SIGKILL)
    assert fleet.up.process.wait(60.0) == 1
    out = fleet.up.out.read_text()
    said = re.search(rf"prefill-0 \(pid {pid}\) was ended by signal 9; the end of its log", out)
    assert said, out
    assert "prefill_ended" in out[said.end() :], "its log ends with its last requests"
    assert fleet.up.left(fleet.at) == []
