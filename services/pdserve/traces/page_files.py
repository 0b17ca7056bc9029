"""The files of the page, read once at the start, and what a browser may do with them."""

from dataclasses import dataclass
from importlib import resources

PAGE = "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
HEADERS = {
    # Nothing from outside, nothing inline: what a span says can never become code.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    """One of them."""

    content: bytes
    type: str


def load() -> dict[str, File]:
    """Files by their path under /; index.html also at /. Nothing where this build has no page."""
    folder = resources.files(__package__).joinpath(PAGE)
    if not folder.is_dir():
        return {}
    found = {
        f"/{entry.name}": File(entry.read_bytes(), _TYPES[suffix])
        for entry in folder.iterdir()
        if entry.is_file() and (suffix := f".{entry.name.rpartition('.')[2]}") in _TYPES
    }
    if "/index.html" in found:
        found["/"] = found["/index.html"]
    return found
