"""kvd's answers as tables; pure. Ids are shortened to eight characters: --json has them whole."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pdserve.api.common.v1 import common_pb2
from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.cli import text
from pdserve.cli.kvd_json import word

_ID: Final = 8
_HANDLE: Final = 28
"""Longest handle that is shown whole."""
_RUNS: Final = 8
"""Most block ranges of one lease that are shown."""


def describe(answer: kvd_pb2.DescribeResponse, target: str) -> str:
    """The daemon, its engines and their memory, and what happened since its start."""
    head = f"kvd {answer.version} at {target}: epoch {answer.kvd_epoch[:_ID]}, up {age(answer.uptime_seconds)}, "
    head += f"over {', '.join(answer.transports) or 'no transport'}"
    if answer.copier:
        head += f" ({answer.copier} copies)"
    parts = [head + (", DRAINING: takes no new transfers" if answer.draining else "")]
    engines = [
        (e.engine_id[:_ID], str(e.ranks), "over" if e.ended else age(e.age_seconds), _participants(e.participants))
        for e in answer.engines
    ]
    parts.append(text.table(("engine", "ranks", "alive", "participants (pid)"), engines, left=4))
    regions = [
        (
            f"{r.engine_id[:_ID]}/{r.rank}",
            f"{r.kind}, mori in {r.registered_by}" if r.registered_by else r.kind,
            text.size(r.bytes),
            *(str(count) for count in (r.num_blocks, r.free, r.leased, r.in_flight, r.quarantined)),
        )
        for r in answer.regions
    ]
    header = ("region", "kind", "size", "blocks", "free", "leased", "in flight", "quarantined")
    parts.append(text.table(header, regions, left=2))
    if answer.peer_address:
        parts.append(_peers(answer))
    if answer.carried:
        parts.append(_carried(answer.carried))
    ended = {k.removeprefix("ended."): n for k, n in answer.transfers.items() if k.startswith("ended.")}
    open_ = {k: n for k, n in answer.transfers.items() if k.startswith(("producer.", "consumer."))}
    facts = (
        ("open ends", _counts(open_)),
        ("ended", _counts(ended)),
        ("ran out", _counts(answer.expiries)),
        ("fences", _fences(answer.fences)),
        ("defects", str(answer.defects) if answer.defects else "none"),
    )
    parts.append("\n".join(f"{name:<9}  {value}" for name, value in facts))
    return "\n\n".join(parts)


def transfers(listed: Sequence[kvd_pb2.Transfer]) -> str:
    """One line a transfer, the oldest first."""
    if not listed:
        return "no open transfer"
    header = ("transfer", "mode", "age", "producer", "consumers", "landed / wanted", "over", "requests", "waits for")
    rows = []
    for one in sorted(listed, key=lambda t: -t.age_seconds):
        consumers = zip(one.consumer_engine_ids, one.consumer_states, strict=True)
        wanted = text.size(one.bytes_wanted) if one.bytes_wanted else "?"
        handles = dict.fromkeys((one.producer_handle, *one.consumer_handles))
        why = f" [{one.reason}{f': {one.detail}' if one.detail else ''}]" if one.reason else ""
        rows.append(
            (
                one.transfer_id.hex()[:_ID],
                word(common_pb2.TransferMode.DESCRIPTOR, one.mode),
                age(one.age_seconds),
                f"{one.producer_engine_id[:_ID]} {one.producer_state}",
                ", ".join(f"{engine[:_ID]} {state}" for engine, state in consumers) or "none",
                f"{text.size(one.bytes_moved)} / {wanted}",
                f"{one.transport} {one.lanes}".strip() or "-",
                ", ".join(_cut(handle) for handle in handles if handle),
                one.waits_for + why,
            )
        )
    return text.table(header, rows, left=len(header))


def leases(held: Sequence[kvd_pb2.Lease]) -> str:
    """One line a lease, the oldest first."""
    if not held:
        return "no lease"
    header = ("lease", "engine", "transfer", "age", "remaining", "in flight", "quarantined", "blocks", "which")
    rows = [
        (
            one.lease_id,
            one.engine_id[:_ID],
            one.transfer_id.hex()[:_ID],
            age(one.age_seconds),
            age(one.remaining_seconds) if one.expires else "-",
            str(one.in_flight),
            f"since {age(one.quarantined_seconds)}" if one.quarantined else "no",
            str(len(one.block_ids)),
            ranges(one.block_ids),
        )
        for one in sorted(held, key=lambda lease: -lease.age_seconds)
    ]
    return text.table(header, rows, left=len(header))


def drained(answer: kvd_pb2.DrainResponse, left: Sequence[kvd_pb2.Transfer]) -> str:
    """How a drain went, and what it leaves."""
    if not answer.remaining:
        return "drained: no transfer is open" + ("" if answer.draining else "; the drain was undone")
    how = "the drain goes on, new transfers are refused" if answer.draining else "the drain was undone"
    return f"{answer.remaining} left; {how}\n\n{transfers(left)}"


def ranges(blocks: Iterable[int], most: int = _RUNS) -> str:
    """Block ids in order with runs merged, "3-9,12"; after `most` runs only their number."""
    runs: list[tuple[int, int]] = []
    for block in sorted(set(blocks)):
        if runs and runs[-1][1] == block - 1:
            runs[-1] = (runs[-1][0], block)
        else:
            runs.append((block, block))
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:most]]
    if len(runs) > most:
        shown.append(f"... {len(runs) - most} more")
    return ",".join(shown)


def age(seconds: float) -> str:
    """Seconds as people read them: 0.4 s, 12 m 3 s, 5 h 2 m."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} m" if hours else f"{minutes} m {rest} s"


def _participants(members: Iterable[kvd_pb2.EngineParticipant]) -> str:
    words = []
    for member in members:
        kind = word(kvd_pb2.Participant.DESCRIPTOR, member.participant)
        rank = f" {member.rank}" if member.participant == kvd_pb2.PARTICIPANT_WORKER else ""
        lost = "" if member.attached else f", no stream since {age(member.lost_seconds)}"
        words.append(f"{kind}{rank} ({member.pid}{lost})")
    return ", ".join(words) or "none"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _peers(answer: kvd_pb2.DescribeResponse) -> str:
    rows = [
        (
            peer.address or peer.node,
            peer.kvd_epoch[:_ID] or "?",
            peer.state,
            *(str(count) for count in (peer.engines, peer.operations, peer.relayed)),
            f"{peer.clock_ahead_seconds:+.3f} s ± {text.milliseconds(peer.clock_uncertainty_seconds)} ms",
        )
        for peer in answer.peers
    ]
    header = ("peer", "epoch", "state", "engines", "copies there", "accepts there", "its clock")
    lost = f"; {answer.peers_lost} links lost so far" if answer.peers_lost else ""
    return f"peers reach it at {answer.peer_address}{lost}\n{text.table(header, rows, left=3)}"


def _carried(carried: Iterable[kvd_pb2.Carried]) -> str:
    rows = [
        (
            one.transport,
            one.lanes or "-",
            str(one.copies),
            text.size(one.bytes),
            f"{one.bytes / one.copy_seconds / 1e9:.2f} GB/s" if one.copy_seconds else "-",
        )
        for one in carried
    ]
    return text.table(("carried by", "over", "copies", "bytes", "of one copy"), rows, left=2)


def _fences(fences: kvd_pb2.Fences) -> str:
    if not fences.count and not fences.torn_down:
        return "none"
    words = f"{fences.count}, {fences.waited} of them waited; longest {text.milliseconds(fences.longest_seconds)} ms, "
    words += f"{text.milliseconds(fences.total_seconds)} ms in all; "
    return f"{words}{fences.torn_down} past the bound of {fences.bound_seconds:g} s, with the session torn down"


def _cut(handle: str) -> str:
    return handle if len(handle) <= _HANDLE else handle[: _HANDLE - 3] + "..."
