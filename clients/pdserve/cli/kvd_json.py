"""kvd's answers as plain values for JSON: the names of kvd.proto, ids in hex, enums as short words; pure."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """A message with every field, also those that are empty."""
    return {field.name: _plain(getattr(message, field.name), field.enum_type) for field in message.DESCRIPTOR.fields}


def _plain(value: Any, enum: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, int) and enum is not None:
        return word(enum, value)
    if isinstance(value, str | int | float):  # bool is an int
        return value
    if isinstance(value, Mapping):
        return {str(key): value[key] for key in sorted(value)}
    return [_plain(one, enum) for one in value]


def word(enum: Any, value: int) -> str:
    """TRANSFER_MODE_READ of its descriptor as "read"; the number where a newer kvd knows more."""
    known = enum.values_by_number.get(value)
    if known is None:
        return str(value)
    first = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    name: str = known.name
    return name.removeprefix(first).lower()
