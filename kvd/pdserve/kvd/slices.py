"""How a plan of many pieces is cut, so that few of them are in memory at a time. Pure.

layers  |     0     |     1     |     2     |
units   | a | b | c | a | b | c | a | b | c |
slices  '-----------------------'-----------'     layers of few pieces go together, whole
        '-------'---'-------'---'-------'---'     one of many is cut between units
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slice:
    """Some of a plan's layers and units, by where they are in its lists."""

    layers: slice
    units: slice


def cut(layers: int, units: int, each: int, most: int) -> Iterator[Slice]:
    """Every unit of every layer once, layer by layer, in slices of at most `most` pieces or of one unit of one layer.

    `each`: pieces of a unit in a layer.
    """
    of_layer = units * each
    if not of_layer:
        return
    if of_layer <= most:
        step = most // of_layer
        for low in range(0, layers, step):
            yield Slice(slice(low, low + step), slice(0, units))
        return
    step = max(1, most // each)
    for layer in range(layers):
        for low in range(0, units, step):
            yield Slice(slice(layer, layer + 1), slice(low, low + step))
