"""The form in which a request's part in a hand-over rides through an engine.

An engine carries one opaque map a request (vLLM: `SamplingParams.extra_args["kv_transfer_params"]`)
from its front to its connector and one back. Ours has a single key, `pdserve`, and plain values
that msgpack keeps as they are.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pdserve.engine.checks import check_transfer_id
from pdserve.engine.port import Consume, Produce
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import InvalidRequest

KEY: Final = "pdserve"

_FIELDS: Final[Mapping[str, Mapping[str, type]]] = {
    "produce": {"transfer_id": bytes, "mode": str, "consumers": int, "peer_locator": bytes},
    "consume": {
        "transfer_id": bytes,
        "mode": str,
        "consumer": int,
        "ticket": bytes,
        "peer_locator": bytes,
        "recompute": bool,
    },
}


def encode(kv: Produce | Consume | None) -> dict[str, Any] | None:
    """The map that rides with a request; None for one that takes no part.

    Raises:
        InvalidRequest: see `check`.
    """
    if kv is None:
        return None
    check(kv)
    if isinstance(kv, Produce):
        values: dict[str, Any] = {
            "role": "produce",
            "transfer_id": kv.transfer_id,
            "mode": kv.mode.value,
            "consumers": kv.consumers,
            "peer_locator": kv.peer_locator,
        }
    else:
        values = {
            "role": "consume",
            "transfer_id": kv.transfer_id,
            "mode": kv.mode.value,
            "consumer": kv.consumer,
            "ticket": kv.ticket,
            "peer_locator": kv.peer_locator,
            "recompute": kv.recompute,
        }
    return {KEY: values}


def decode(params: Mapping[str, Any] | None) -> Produce | Consume | None:
    """What `encode` was given; None and an empty map mean a request that takes no part.

    Raises:
        InvalidRequest: another connector's map, an unknown or missing field, or a bad value.
    """
    if not params:
        return None
    if set(params) != {KEY} or not isinstance(params[KEY], Mapping):
        raise InvalidRequest(f"kv_transfer_params must have the one key {KEY!r}, not {sorted(map(str, params))}")
    values = dict(params[KEY])
    role = values.pop("role", None)
    fields = _FIELDS.get(role) if isinstance(role, str) else None
    if fields is None:
        raise InvalidRequest(f"kv_transfer_params: role is {role!r}, not produce or consume")
    if set(values) != set(fields):
        odd = sorted(map(str, set(values) ^ set(fields)))
        raise InvalidRequest(f"kv_transfer_params of a {role}: unknown or missing fields {odd}")
    for name, kind in fields.items():
        if type(values[name]) is not kind:
            raise InvalidRequest(f"kv_transfer_params: {name} is a {type(values[name]).__name__}, not {kind.__name__}")
    try:
        values["mode"] = Mode(values["mode"])
    except ValueError:
        raise InvalidRequest(f"kv_transfer_params: mode is {values['mode']!r}, not read or write") from None
    kv = Produce(**values) if role == "produce" else Consume(**values)
    check(kv)
    return kv


def check(kv: Produce | Consume) -> None:
    """Raises InvalidRequest where the values cannot be meant."""
    check_transfer_id(kv.transfer_id)
    if isinstance(kv, Produce):
        if kv.consumers < 1:
            raise InvalidRequest(f"a transfer needs at least one consumer, not {kv.consumers}")
        return
    if kv.consumer < 0:
        raise InvalidRequest(f"consumer is {kv.consumer}; it counts from 0")
    needed, other = ("ticket", "peer_locator") if kv.mode is Mode.READ else ("peer_locator", "ticket")
    if not getattr(kv, needed) or getattr(kv, other):
        raise InvalidRequest(f"a {kv.mode.value.upper()} consumer needs a {needed} and no {other}")


class Offered(NamedTuple):
    """What a producer's connector returns with its answer."""

    tokens: int = 0
    """Prompt tokens on offer; 0 where nothing is."""
    blocks: int = 0
    last_chunk_ns: int = 0
    """See port.EngineTimes."""


def offered(offer: Offered) -> dict[str, Any]:
    """The map that rides back."""
    return {KEY: offer._asdict()}


def decode_offered(params: Mapping[str, Any] | None) -> Offered:
    """What `offered` was given; `Offered()` where there is no map.

    Raises:
        InvalidRequest: not what `offered` made.
    """
    if not params:
        return Offered()
    values = params.get(KEY)
    if not isinstance(values, Mapping) or set(values) != set(Offered._fields):
        raise InvalidRequest("kv_transfer_params of an answer are not pdserve's")
    return Offered(**{name: int(value) for name, value in values.items()})
