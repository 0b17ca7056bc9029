"""What is shown while processes come and go."""

import io

import pytest

from pdserve.cli.board import Board


def test_without_a_terminal_there_is_a_line_per_change() -> None:
    """Each state is said once with the elapsed time; numbers that change all the time are not said."""
    out, now = io.StringIO(), [100.0]
    board = Board(out, terminal=False, clock=lambda: now[0])
    board.show("kvd", "starting")
    now[0] = 107.4
    board.show("kvd", "starting")
    board.show("kvd", "ready", "1 running")
    board.show("kvd", "ready", "2 running")
    board.refresh()
    board.say("done")
    assert out.getvalue() == "[0 s] kvd: starting\n[7 s] kvd: ready\ndone\n"


def test_on_a_terminal_rows_are_drawn_in_place() -> None:
    """A change moves up over what was drawn, clears it and draws again; a said line stays above."""
    out = io.StringIO()
    board = Board(out, terminal=True, clock=lambda: 0.0)
    board.show("kvd", "starting")
    board.show("proxy", "ready", "1 running")
    board.say("hello")
    text = out.getvalue()
    assert text.count("\x1b[2A\x1b[J") == 1  # one row and the clock
    assert text.count("\x1b[3A\x1b[J") == 1
    assert text.endswith("hello\n  kvd    starting\n  proxy  ready  1 running\n  0 s\n")


def test_rows_that_were_left_stay() -> None:
    """After `leave` nothing is cleared any more."""
    out = io.StringIO()
    board = Board(out, terminal=True, clock=lambda: 0.0)
    board.show("kvd", "ready")
    board.leave()
    written = out.getvalue()
    board.say("below")
    assert out.getvalue() == f"{written}below\n"


def test_a_row_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a narrow terminal a row is cut, so that one row is one line and can be drawn over."""
    monkeypatch.setenv("COLUMNS", "20")
    out = io.StringIO()
    Board(out, terminal=True, clock=lambda: 0.0).show("kvd", "ready", "x" * 100)
    assert max(len(line) for line in out.getvalue().splitlines()) < 20
