"""Every colour of the report, by meaning, for light and dark. Pure.

Figures are drawn in the light colours. In the page each becomes a CSS variable, so one drawing serves both; a PNG stays
light. Nothing is told by colour alone: configurations also have a letter and a marker, a miss is hatched, parts have
numbers. The configurations' colours are apart for the common kinds of colour blindness (after Okabe and Ito, darkened
to a contrast of 3:1 on white).
"""

INK, MUTED, GRID, RULE, SURFACE = "#1b1e23", "#5b616a", "#e6e6e1", "#b9bab4", "#ffffff"
SLO, MET, MISSED = "#b3261e", "#8fa9c4", "#c2410c"

THEMED: dict[str, tuple[str, str, str]] = {
    INK: ("ink", "#1b1e23", "#e7e9ec"),
    MUTED: ("muted", "#5b616a", "#a1a8b2"),
    GRID: ("line", "#e6e6e1", "#2e3338"),
    RULE: ("strong-line", "#b9bab4", "#565c65"),
    SURFACE: ("surface", "#ffffff", "#191c1f"),
    SLO: ("slo", "#b3261e", "#ff8a80"),
    MET: ("met", "#8fa9c4", "#56789c"),
    MISSED: ("missed", "#c2410c", "#f28a4b"),
    "#0068ad": ("entry-0", "#0068ad", "#62b4f0"),
    "#d4660a": ("entry-1", "#d4660a", "#f5a04f"),
    "#00806a": ("entry-2", "#00806a", "#3fc79f"),
    "#9c3a8b": ("entry-3", "#9c3a8b", "#de8cd2"),
    "#8a6d02": ("entry-4", "#8a6d02", "#d6b84c"),
    "#2b8bc4": ("entry-5", "#2b8bc4", "#9ad8fb"),
    "#6b7280": ("entry-6", "#6b7280", "#b3bac4"),
    "#7a4a29": ("entry-7", "#7a4a29", "#cda27a"),
}
"""Drawn colour: its CSS variable, its light value, its dark value."""

ENTRIES = tuple(colour for colour, (name, _, _) in THEMED.items() if name.startswith("entry-"))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (2, 2), (7, 2, 2, 2))

DARK_TEXT, LIGHT_TEXT = "#14171c", "#fefefe"
"""On a part's bar; the same in light and dark, as the bars are."""

PARTS: dict[str, tuple[str, str]] = {
    "admit": ("#dfe2e7", DARK_TEXT),
    "tokenize": ("#c3c9d1", DARK_TEXT),
    "route": ("#a3abb7", DARK_TEXT),
    "prefill.hop": ("#d3e3f4", DARK_TEXT),
    "prefill.queue": ("#8ab3df", DARK_TEXT),
    "prefill.forward": ("#3f78b5", LIGHT_TEXT),
    "proxy.serialization": ("#e0701a", DARK_TEXT),
    "decode.admit": ("#cfebdd", DARK_TEXT),
    "kv.wait": ("#8f3d8a", LIGHT_TEXT),
    "decode.queue": ("#86c4ad", DARK_TEXT),
    "decode.first_step": ("#3f8a6e", LIGHT_TEXT),
    "detokenize": ("#e9deb9", DARK_TEXT),
    "encode": ("#cfc08c", DARK_TEXT),
    "egress": ("#ad9d5e", DARK_TEXT),
}
"""Part of the time to first token, in path order: its colour and that of words on it."""
OTHER_PARTS = ("#cbd5c0", "#9fb08d", "#d8c3cf", "#b497a8")
HATCHED = {"kv.wait": "////"}


def entry_colour(place: int) -> str:
    """Of the configuration at this place."""
    return ENTRIES[place % len(ENTRIES)]


def entry_marker(place: int) -> str:
    """Of the configuration at this place, in matplotlib's letters."""
    return MARKERS[place % len(MARKERS)]


def entry_dashes(place: int) -> tuple[float, ...]:
    """Of its line: past the eighth configuration colours come again, dashed."""
    return DASHES[place // len(ENTRIES) % len(DASHES)]


def variables(dark: bool) -> str:
    """The CSS declarations of one theme."""
    return "\n".join(f"--{name}: {night if dark else day};" for name, day, night in THEMED.values())
