"""No failpoint is dead: each fires somewhere in a fleet that serves."""

import pytest

from pdserve.runtime.failpoints import Kind, Point
from tests.matrix.cells import MODES
from tests.matrix.fleet import Fleet


@pytest.mark.asyncio(loop_scope="session")
async def test_every_point_fires(fleet: Fleet) -> None:
    """With every point armed, requests in both modes and an engine's restart go by all of them, unharmed."""
    for name in fleet.members:
        await arm_all(fleet, name)
    await fleet.kill("prefill-0")
    await fleet.spawn("prefill-0")
    await arm_all(fleet, "prefill-0")
    for mode in MODES:
        for _ in range(2):
            _, completion = await fleet.ask(mode)
            assert not completion.fallbacks
    fired = dict.fromkeys(Point, 0)
    for member in fleet.members.values():
        for point in Point:
            fired[point] += (await member.failpoints.awaited(point, seconds=0.0)).fired
    assert [point.value for point, count in fired.items() if not count] == []


async def arm_all(fleet: Fleet, name: str) -> None:
    """Every point of a member does something that hurts nobody."""
    for point in Point:
        await fleet.members[name].failpoints.arm(point, "return(0)" if point.kind is Kind.VALUE else "1*delay(1)")
