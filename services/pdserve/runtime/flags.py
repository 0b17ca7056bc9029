"""Frozen config dataclasses from the command line and from maps; unknown keys are refused.

Each field becomes the flag `--field-name`; the line under the field is the flag's help, so that the
code and `--help` cannot disagree. A field without a default is a required flag.

Types: str, int, float, bool, Path, an Enum (by value), each also `| None`, `tuple[str, ...]` (repeatable),
and a config dataclass with a default: field `cost` of it gives `--cost-...`.
"""

import argparse
import ast
import dataclasses
import enum
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pdserve.rpc.errors import ConfigError

C = TypeVar("C")
T = TypeVar("T")


def field_docs(config: type[Any]) -> dict[str, str]:
    """The docstring line under each field of a dataclass, by field name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


def add_flags(parser: argparse.ArgumentParser, config: type[Any], prefix: str = "", skip: Collection[str] = ()) -> None:
    """Adds one flag per field but those in `skip`; `prefix` "sim-" makes `--sim-layers` of `layers`."""
    hints = typing.get_type_hints(config)
    docs = field_docs(config)
    group = parser.add_argument_group(_summary(config))
    for field in dataclasses.fields(config):
        if field.name in skip:
            continue
        flag = f"{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(hints[field.name]):
            add_flags(parser, hints[field.name], f"{flag}-")
            continue
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        # Defaults stay in the dataclass: a flag that is not given is not in the namespace.
        options: dict[str, Any] = {
            "dest": _dest(flag),
            "required": required,
            "default": argparse.SUPPRESS,
            "help": _help(docs.get(field.name, ""), field.default),
        }
        kind, many = _kind(hints[field.name])
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif issubclass(kind, enum.Enum):
            options["choices"] = [member.value for member in kind]
        else:
            options["type"] = kind
            options["metavar"] = kind.__name__.upper()
        if many:
            options["action"] = "append"
        group.add_argument(f"--{flag}", **options)


def from_args(config: type[C], args: argparse.Namespace, prefix: str = "", **fixed: Any) -> C:
    """Builds a config from parsed flags, with `fixed` values for fields that had none.

    Raises:
        ConfigError: a value that the config itself refuses.
    """
    hints = typing.get_type_hints(config)
    given = dict(fixed)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]  # C is a dataclass
        flag = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            inner = _given(hints[field.name], args, f"{flag}-")
            if inner:
                default: Any = field.default
                given[field.name] = _checked(config, partial(dataclasses.replace, default, **inner))
        elif hasattr(args, _dest(flag)):
            given[field.name] = getattr(args, _dest(flag))
    return from_mapping(config, given)


def from_mapping(config: type[C], values: Mapping[str, Any]) -> C:
    """Builds a config from names and values.

    Raises:
        ConfigError: an unknown or missing key, or a value that the config itself refuses.
    """
    fields = {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]  # C is a dataclass
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(f"{config.__name__} has no {', '.join(unknown)}")
    hints = typing.get_type_hints(config)
    return _checked(config, lambda: config(**{name: _convert(hints[name], value) for name, value in values.items()}))


def _given(config: Any, args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    hints = typing.get_type_hints(config)
    names = [field.name for field in dataclasses.fields(config) if hasattr(args, _dest(prefix + field.name))]
    return {name: _convert(hints[name], getattr(args, _dest(prefix + name))) for name in names}


def _checked(config: Any, make: Callable[[], T]) -> T:
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{config.__name__}: {error}") from error


def split_passthrough(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is before the first `--`, and what is after it."""
    own = list(argv)
    if "--" not in own:
        return own, []
    at = own.index("--")
    return own[:at], own[at + 1 :]


def _convert(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return value
    kind, many = _kind(hint)
    if value is None:
        return None
    if many:
        return tuple(kind(item) for item in value)
    return value if isinstance(value, kind) else kind(value)


def _kind(hint: Any) -> tuple[type[Any], bool]:
    """The scalar type of a field, and whether it takes many."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    if not isinstance(hint, type) or not issubclass(hint, (str, int, float, bool, Path, enum.Enum)):
        raise TypeError(f"no flag can be made of a field of type {hint}")
    return hint, False


def _dest(flag: str) -> str:
    return flag.replace("-", "_")


def _summary(config: type[Any]) -> str:
    return (config.__doc__ or config.__name__).strip().splitlines()[0].rstrip(".")


def _help(doc: str, default: Any) -> str:
    shown = default.value if isinstance(default, enum.Enum) else default
    known = shown is not dataclasses.MISSING and shown not in (None, "", (), False)
    text = f"{doc} Default: {shown}." if known else doc
    return text.replace("%", "%%")
