"""The map that rides through the engine: what goes in comes out, and nothing else is taken."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.handoff import params
from pdserve.engine.port import Consume, Produce
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import InvalidRequest

TID = bytes(16)

produces = st.builds(
    Produce,
    transfer_id=st.binary(min_size=16, max_size=16),
    mode=st.sampled_from(Mode),
    consumers=st.integers(1, 64),
    peer_locator=st.binary(max_size=8),
)
consumes = st.one_of(
    st.builds(
        Consume,
        transfer_id=st.binary(min_size=16, max_size=16),
        mode=st.just(Mode.READ),
        consumer=st.integers(0, 64),
        ticket=st.binary(min_size=1, max_size=8),
        recompute=st.booleans(),
    ),
    st.builds(
        Consume,
        transfer_id=st.binary(min_size=16, max_size=16),
        mode=st.just(Mode.WRITE),
        consumer=st.integers(0, 64),
        peer_locator=st.binary(min_size=1, max_size=8),
        recompute=st.booleans(),
    ),
)


@given(kv=st.one_of(produces, consumes, st.none()))
def test_params_survive_msgpack(kv: Produce | Consume | None) -> None:
    """Decoding what was encoded and carried as msgpack gives the same value."""
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(params.encode(kv)))
    assert params.decode(carried) == kv


def good() -> dict[str, Any]:
    encoded = params.encode(Consume(TID, Mode.READ, 0, ticket=b"t"))
    assert encoded is not None
    inner: dict[str, Any] = encoded[params.KEY]
    return inner


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"role": "both"}, "role"),
        ({"role": None}, "role"),
        ({"extra": 1}, "extra"),
        ({"mode": "push"}, "mode"),
        ({"mode": 1}, "mode is a int"),
        ({"transfer_id": b"short"}, "5 bytes"),
        ({"transfer_id": "x" * 16}, "transfer_id is a str"),
        ({"consumer": -1}, "counts from 0"),
        ({"consumer": True}, "consumer is a bool"),
        ({"ticket": b""}, "ticket"),
        ({"peer_locator": b"x"}, "peer_locator"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], words: str) -> None:
    """Unknown fields, roles, modes and wrong types are refused with the name of what is wrong."""
    with pytest.raises(InvalidRequest, match=words):
        params.decode({params.KEY: {**good(), **change}})


def test_another_connectors_params_are_refused() -> None:
    """NIXL's or MORI-IO's map is not taken for ours; a missing field is named."""
    with pytest.raises(InvalidRequest, match="do_remote_prefill"):
        params.decode({"do_remote_prefill": True})
    values = good()
    del values["recompute"]
    with pytest.raises(InvalidRequest, match="recompute"):
        params.decode({params.KEY: values})


def test_no_params_mean_no_part() -> None:
    """None and an empty map are a plain request."""
    assert params.decode(None) is None
    assert params.decode({}) is None
    assert params.encode(None) is None


def test_a_producer_needs_a_consumer() -> None:
    """Zero consumers would never release the blocks."""
    with pytest.raises(InvalidRequest, match="at least one consumer"):
        params.encode(Produce(TID, Mode.READ, 0))


def test_offered_survives() -> None:
    """What the producer's connector returns is read back; nothing means nothing on offer."""
    assert params.decode_offered(params.offered(params.Offered(17, 2, 9))) == (17, 2, 9)
    assert params.decode_offered(None) == (0, 0, 0)
    with pytest.raises(InvalidRequest):
        params.decode_offered({"remote_block_ids": []})
