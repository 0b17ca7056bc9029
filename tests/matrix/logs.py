"""What the members of the fleet wrote to their logs, from a moment on."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Log:
    """A log of JSON lines that is read as it grows."""

    path: Path
    _at: int = 0

    def mark(self) -> None:
        """Forgets what is there now."""
        self._at = self.path.stat().st_size if self.path.exists() else 0

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """The events since the mark, of one name or all. A line that is still being written, and one
        that is no event (a traceback), are passed over."""
        return [line for line in self._lines() if not name or line.get("event") == name]

    def tail(self, lines: int = 40) -> str:
        """The last lines since the mark, for people."""
        return "\n".join(self._text().splitlines()[-lines:])

    def _text(self) -> str:
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(self._at)
            return file.read().decode(errors="replace")

    def _lines(self) -> list[dict[str, Any]]:
        found = []
        for line in self._text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                found.append(event)
        return found
