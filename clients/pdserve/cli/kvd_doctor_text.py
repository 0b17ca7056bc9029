"""What `pdserve kvd doctor` shows of a measurement, and whether it is what was expected; pure."""

from collections.abc import Sequence
from typing import Final

from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.cli import text

_ID: Final = 8
_ALONE: Final = (
    "no other node was measured: this kvd is linked to none yet (the first hand-over links them); "
    "--peer HOST:PORT names one"
)


def shown(answer: kvd_pb2.MeasureResponse, target: str) -> str:
    """The devices, what mori listens at, and a paragraph for each way: latency of one block of 4 KiB, and the rate of
    many scattered ones by their size."""
    devices = ", ".join(_device(one) for one in answer.devices) or "none"
    head = f"kvd at {target}: measured with {text.size(answer.scratch_bytes)} on each side, in {answer.seconds:.1f} s\n"
    head += f"devices here: {devices}"
    head += "".join(f"\n{_listener(one)}" for one in answer.listeners)
    parts = [head, *(_way(way) for way in answer.ways)]
    if not any(way.peer for way in answer.ways):
        parts.append(_ALONE)
    if any("--transport" in one.why_not for way in answer.ways for one in way.candidates):
        parts.append("under `pdserve up` --transport NAME is said as --kvd transport=NAME")
    return "\n\n".join(parts)


def place(way: kvd_pb2.Way) -> str:
    """Where a way comes from, in words."""
    if way.peer:
        return f"from {way.peer}"
    if not way.from_device:
        return "within this node"
    if way.from_device == way.to_device:
        return f"within {way.to_device}"
    return f"from {way.from_device} to {way.to_device}"


def unmet(ways: Sequence[kvd_pb2.Way], expected: str) -> list[str]:
    """Where the expected is not what would be used, a sentence each. Between nodes wherever there is a peer: what is
    used within the node is then no matter. It is met by a peer, or by the node, where it carries all of one kind of
    memory: host memory of a node and that of its GPUs are never carried by the same transport."""
    asked = [way for way in ways if way.peer] or list(ways)
    wrong = []
    for peer in dict.fromkeys(way.peer for way in asked):
        here = [way for way in asked if way.peer == peer]
        missed = [way for way in here if not _is_used(way, expected)]
        if {way.kind for way in here} <= {way.kind for way in missed}:
            wrong += [f"{place(way)} {_kind(way)}{_instead(way)}, not {expected}" for way in missed]
    return wrong


def broken(answer: kvd_pb2.MeasureResponse) -> list[str]:
    """Ways that do not work, and ports that strangers may reach, a sentence each."""
    sick = [one.error for one in answer.listeners if one.error]
    for way in answer.ways:
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
    over = used.lanes or used.link
    return f"{used.transport} over {over}" if over else used.transport


def _kind(way: kvd_pb2.Way) -> str:
    return "" if way.kind == "host" else f"for {way.kind} memory "


def _way(way: kvd_pb2.Way) -> str:
    who = f" ({way.node}, epoch {way.kvd_epoch[:_ID]})" if way.kvd_epoch else ""
    used = _used(way)
    if way.error:
        said = f"NO WAY: {way.error} [{way.reason}]"
    else:
        said = f"{_over(used)} is used" if used is not None else "nothing is used"
        if way.not_measured:
            said += f", NOT MEASURED: {way.not_measured}"
    lines = [f"{place(way)}{who}, {way.kind} memory: {said}"]
    lines += [f"WARNING: {warning}" for warning in way.warnings]
    if way.candidates:
        lines.append(_table(way))
    return "\n".join(lines)


def _table(way: kvd_pb2.Way) -> str:
    blocks = sorted({speed.block_bytes for one in way.candidates for speed in one.speeds})
    sizes = [f"{block >> 20} MiB" if block >= 1 << 20 else f"{block >> 10} KiB" for block in blocks]
    measured = [f"{size} blocks" for size in sizes]
    timed = ["latency"] if any(one.latency_seconds for one in way.candidates) else []
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
    elif best and one.link == "XGMI":
        words.append("nominal rate not known")
    return "; ".join(word for word in words if word) or "-"


def _last_left(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose last column, of words, is not aligned to the right."""
    whole = text.table(header[:-1], [row[:-1] for row in rows], left=2).splitlines()
    width = max(len(line) for line in whole)
    words = [header[-1], "-" * max(len(row[-1]) for row in [header, *rows]), *(row[-1] for row in rows)]
    return "\n".join(f"{line:<{width}}  {word}" for line, word in zip(whole, words, strict=True))


def _device(one: kvd_pb2.Device) -> str:
    rate = f"{one.bits_per_second / 1e9:g} Gbit/s" if one.bits_per_second else "rate not known"
    known = {"net": f"network, {rate}", "gpu": "GPU", "xgmi": f"GPU with XGMI, a link {rate}"}
    return f"{one.name} ({known.get(one.kind, f'{one.kind.upper()}, {rate}')}{'' if one.up else ', down'})"


def _listener(one: kvd_pb2.Listener) -> str:
    if one.error:
        return f"ERROR: {one.error}"
    if not one.port:
        return f"{one.transport}'s control port (process {one.pid}): it does not listen"
    address = f"[{one.address}]" if ":" in one.address else one.address
    return f"{one.transport}'s control port (process {one.pid}): {address}:{one.port}, {one.exposure}"
