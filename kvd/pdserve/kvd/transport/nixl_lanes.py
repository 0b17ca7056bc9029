"""Which of its lanes UCX reads over, from what it writes about itself. Pure.

nixl hands no endpoint out that could be asked, and its parameters do not name the lanes. With
`UCX_PROTO_INFO=y` UCX writes a table for each kind of operation when it is first used:

    [1796053386.473608] [vm:25153:0]   | client intra-node cfg#1                                         |
    [1796053386.473608] [vm:25153:0]   | remote memory read by ucp_get*(multi) into host memory from host |
    [1796053386.473608] [vm:25153:0]   | Range  | Description |                 Config                   |
    [1796053386.473608] [vm:25153:0]   | 0..inf | zero-copy   | cma/memory                               |
"""

import re
from typing import Final

UNKNOWN: Final = "unknown"
"""Nothing was read yet, or UCX says it in other words."""

_CELLS: Final = re.compile(r"\|(.+)\|\s*$")
_TABLE: Final = re.compile(r"\]\s+(\|.*\||\+[-+]*\+)\s*$")
_READ: Final = re.compile(r"remote memory read by ucp_get\*\(multi\)")
_RANGE: Final = re.compile(r"\d+[KMG]?\.\.(\d+[KMG]?|inf)|\d+")


def read_lanes(words: str) -> str:
    """What reads are carried by, as "tcp/eth0 (software emulation)"; of the last table, each lane once."""
    found: list[str] = []
    reading = False
    for line in words.splitlines():
        row = _CELLS.search(line)
        if row is None:
            continue
        cells = [cell.strip() for cell in row[1].split("|")]
        if len(cells) == 1:
            if _READ.search(cells[0]):
                reading, found = True, []
            elif " cfg#" in cells[0] or " by ucp_" in cells[0]:
                reading = False
        elif reading and len(cells) == 3 and _RANGE.fullmatch(cells[0]):
            lane = f"{cells[2]} ({cells[1]})"
            if lane not in found:
                found.append(lane)
    return ", ".join(found) or UNKNOWN


def plain_words(words: str) -> str:
    """What else UCX and nixl have written: without the tables."""
    return "\n".join(line for line in words.splitlines() if not _TABLE.search(line)).strip()
