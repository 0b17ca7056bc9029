"""Shows what each process of a deployment is doing: in place on a terminal, a line per change elsewhere."""

import shutil
import time
from collections.abc import Callable
from typing import TextIO


class Board:
    """One row per process. `clock` is monotonic seconds."""

    def __init__(self, out: TextIO, *, terminal: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._terminal = terminal
        self._clock = clock
        self._began = clock()
        self._rows: dict[str, tuple[str, str]] = {}
        self._drawn = 0

    def say(self, line: str) -> None:
        """A line above the rows, which stays."""
        self._erase()
        self._out.write(f"{line}\n")
        self._draw()

    def show(self, name: str, state: str, detail: str = "") -> None:
        """The state of one process, and numbers that only a terminal shows, because they change all the time."""
        changed = self._rows.get(name, ("", ""))[0] != state
        self._rows[name] = (state, detail)
        if self._terminal:
            self._erase()
            self._draw()
        elif changed:
            self._out.write(f"[{self._elapsed()}] {name}: {state}\n")
            self._out.flush()

    def refresh(self) -> None:
        """Draws the elapsed time again."""
        if self._terminal and self._rows:
            self._erase()
            self._draw()

    def leave(self) -> None:
        """Lets the rows stand where they are; new ones begin below. Without a terminal: nothing is to be left."""
        if self._terminal:
            self._rows.clear()
            self._drawn = 0

    def _draw(self) -> None:
        if self._terminal and self._rows:
            columns = shutil.get_terminal_size().columns
            width = max(len(name) for name in self._rows)
            for name, (state, detail) in self._rows.items():
                line = f"  {name:<{width}}  {state}{'  ' if detail else ''}{detail}"
                self._out.write(f"{line[: columns - 1]}\n")  # a line that wraps could not be drawn over
            self._out.write(f"  {self._elapsed()}\n")
            self._drawn = len(self._rows) + 1
        self._out.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._out.write(f"\x1b[{self._drawn}A\x1b[J")  # up, and clear to the end of the screen
            self._drawn = 0

    def _elapsed(self) -> str:
        return f"{self._clock() - self._began:.0f} s"
