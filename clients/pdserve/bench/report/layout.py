"""Where labels go: moves them apart so that none lies on another. Pure; pixels."""

from collections.abc import Sequence


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as can be to the wanted ones, in the same order, at least `gap` apart and inside [low, high].

    Where they do not all fit, they are spaced evenly over the whole range.
    """
    if not wanted:
        return []
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], index))
    need = gap * (len(wanted) - 1)
    if need >= high - low:
        step = (high - low) / (len(wanted) - 1) if len(wanted) > 1 else 0.0
        places = [low + step * rank for rank in range(len(wanted))]
    else:
        places = _merged([min(max(wanted[index], low), high) for index in order], gap, low, high)
    found = [0.0] * len(wanted)
    for rank, index in enumerate(order):
        found[index] = places[rank]
    return found


def _merged(ascending: list[float], gap: float, low: float, high: float) -> list[float]:
    """Groups of touching labels, each centred on what its members want; merged until no two groups touch."""
    groups: list[list[float]] = []
    for value in ascending:
        groups.append([value])
        while len(groups) > 1:
            last, before = groups[-1], groups[-2]
            if _start(before, gap, low, high) + gap * len(before) <= _start(last, gap, low, high):
                break
            groups[-2:] = [before + last]
    return [_start(group, gap, low, high) + gap * rank for group in groups for rank in range(len(group))]


def _start(group: list[float], gap: float, low: float, high: float) -> float:
    length = gap * (len(group) - 1)
    return min(max(sum(group) / len(group) - length / 2, low), high - length)
