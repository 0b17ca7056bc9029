"""What `pdserve kvd doctor` shows of a measurement, and whether it is what was expected; pure."""

from collections.abc import Sequence
from typing import Final

from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.cli import text

_ID: Final = 8


def shown(answer: kvd_pb2.MeasureResponse, target: str) -> str:
    """The devices, and a paragraph for each way."""
    devices = ", ".join(_device(one) for one in answer.devices) or "none"
    head = f"kvd at {target}: measured with {text.size(answer.scratch_bytes)} in {answer.seconds:.1f} s\n"
    return "\n\n".join([f"{head}devices here: {devices}", *(_way(way) for way in answer.ways)])


def place(way: kvd_pb2.Way) -> str:
    """Where a way comes from, in words."""
    return f"from {way.peer}" if way.peer else "within this node"


def unmet(ways: Sequence[kvd_pb2.Way], expected: str) -> list[str]:
    """Where the expected is not what would be used, a sentence each. Between nodes wherever there is a peer: what is
    used within the node is then no matter."""
    asked = [way for way in ways if way.peer] or list(ways)
    return [f"{place(way)} {_kind(way)}{_instead(way)}, not {expected}" for way in asked if not _is_used(way, expected)]


def broken(ways: Sequence[kvd_pb2.Way]) -> list[str]:
    """Ways that do not work, a sentence each."""
    sick = []
    for way in ways:
        used = _used(way)
        if way.error:
            sick.append(f"{place(way)} {_kind(way)}there is no way: {way.error} [{way.reason}]")
        elif used is not None and used.error:
            sick.append(f"{place(way)} {_kind(way)}{used.transport} fails: {used.error}")
    return sick


def _used(way: kvd_pb2.Way) -> kvd_pb2.Candidate | None:
    return next((one for one in way.candidates if one.used), None)


def _is_used(way: kvd_pb2.Way, expected: str) -> bool:
    used = _used(way)
    return used is not None and not used.error and not way.error and expected in used.names


def _instead(way: kvd_pb2.Way) -> str:
    used = _used(way)
    if used is None or way.error:
        return "nothing is used"
    return f"{_over(used)} is used" + (" and fails" if used.error else "")


def _over(used: kvd_pb2.Candidate) -> str:
    return f"{used.transport} over {used.lanes}" if used.lanes else used.transport


def _kind(way: kvd_pb2.Way) -> str:
    return "" if way.kind == "host" else f"for {way.kind} memory "


def _way(way: kvd_pb2.Way) -> str:
    who = f" ({way.node}, epoch {way.kvd_epoch[:_ID]})" if way.kvd_epoch else ""
    used = _used(way)
    if way.error:
        said = f"NO WAY: {way.error} [{way.reason}]"
    else:
        said = f"{_over(used)} is used" if used is not None else "nothing is used"
    lines = [f"{place(way)}{who}, {way.kind} memory: {said}"]
    lines += [f"WARNING: {warning}" for warning in way.warnings]
    if way.candidates:
        lines.append(_table(way))
    return "\n".join(lines)


def _table(way: kvd_pb2.Way) -> str:
    blocks = sorted({speed.block_bytes for one in way.candidates for speed in one.speeds})
    measured = [f"at {block >> 20} MiB" if block >= 1 << 20 else f"at {block >> 10} KiB" for block in blocks]
    timed = ["4 KiB takes"] if any(one.latency_seconds for one in way.candidates) else []
    header = ["transport", "used", *timed, *measured, "remarks"]
    rows = []
    for one in way.candidates:
        speeds = {s.block_bytes: f"{s.bytes / s.seconds / 1e9:.2f} GB/s" for s in one.speeds if s.seconds}
        latency = f"{one.latency_seconds * 1000:.2f} ms" if one.latency_seconds else "-"
        cells = ["yes" if one.used else "no", *([latency] if timed else []), *(speeds.get(b, "-") for b in blocks)]
        rows.append([one.transport, *cells, _remarks(one)])
    return _last_left(header, rows)


def _remarks(one: kvd_pb2.Candidate) -> str:
    words = [one.why_not, f"fails: {one.error}" if one.error else ""]
    best = max((s.bytes / s.seconds for s in one.speeds if s.seconds), default=0.0)
    if best and one.nominal_bytes_per_second:
        share = best / one.nominal_bytes_per_second
        words.append(f"{share:.0%} of the nominal {one.nominal_bytes_per_second / 1e9:.2f} GB/s")
    return "; ".join(word for word in words if word) or "-"


def _last_left(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose last column, of words, is not aligned to the right."""
    whole = text.table(header[:-1], [row[:-1] for row in rows], left=2).splitlines()
    width = max(len(line) for line in whole)
    words = [header[-1], "-" * max(len(row[-1]) for row in [header, *rows]), *(row[-1] for row in rows)]
    return "\n".join(f"{line:<{width}}  {word}" for line, word in zip(whole, words, strict=True))


def _device(one: kvd_pb2.Device) -> str:
    rate = f"{one.bits_per_second / 1e9:g} Gbit/s" if one.bits_per_second else "rate unknown"
    return f"{one.name} ({one.kind if one.kind != 'net' else 'network'}, {rate}{'' if one.up else ', down'})"
