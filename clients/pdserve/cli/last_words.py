"""Why a service has ended, in a sentence, by its own log; pure."""

import json
import re

_EVENTS = {"ended": "detail", "cannot_start": "error", "proxy_died": "error", "traces_died": "error"}
"""Last event of each service, and where it has the sentence."""
_SAID = re.compile(r"pdserve-kvd: (?P<sentence>\S.*)|\S+: error: (?P<usage>\S.*)")
"""kvd for settings that cannot work, before it has a log; any program for a wrong command line."""
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)(: .*|$)")
"""The end of a traceback that nobody caught."""
_LONGEST = 400
"""Characters of a sentence; the log has all of it."""
_PLAIN = ("CONFIG", "UNAVAILABLE")
"""Reasons that whoever tells of the end says himself."""


def of(log: str) -> str:
    """The sentence; empty where the log has none.

    Args:
        log: the end of the log of one life.
    """
    raised = ""
    for line in reversed(log.splitlines()):
        if said := _said(line):
            return said
        if not raised and _RAISED.match(line):
            raised = line
    return _short(raised)


def _said(line: str) -> str:
    if match := _SAID.fullmatch(line):
        return _short(match["sentence"] or match["usage"])
    if not line.startswith("{"):
        return ""
    try:
        event = json.loads(line)
    except ValueError:
        return ""
    name = event.get("event")
    sentence = event.get(_EVENTS[name]) if isinstance(name, str) and name in _EVENTS else None
    if not isinstance(sentence, str):
        return ""
    reason = event.get("reason", "")
    return _short(sentence) + (f" [{reason}]" if reason and reason not in _PLAIN else "")


def _short(sentence: str) -> str:
    """In one line: what follows it is the log's."""
    line = " ".join(sentence.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
