"""docs/http.md tells every error that an HTTP client can get, with its status."""

import re
from pathlib import Path

from pdserve.proxy.http import errors
from pdserve.rpc.errors import BY_REASON

PAGE = Path(__file__).parents[3] / "docs" / "http.md"
UNSEEN = {
    "UNAUTHENTICATED",  # of registrations and peers; the HTTP port asks nobody who they are
    "CONFIG",  # ends a process before it serves
    "CANCELLED",  # whoever is told of it has left
}


def test_every_reason_is_told_with_its_status() -> None:
    """The table has each reason once, in the row of its status, and no other."""
    section = PAGE.read_text().partition("## Errors")[2]
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", section, re.MULTILINE)
    told = [(reason, int(status)) for status, cell in rows for reason in re.findall(r"`([A-Z_]+)`", cell)]
    assert sorted(told) == sorted(
        (reason, errors.status(kind("x"))) for reason, kind in BY_REASON.items() if reason not in UNSEEN
    )
