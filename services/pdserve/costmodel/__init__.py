"""How long one step of an engine takes: pure, shared by the simulated engine and the planner."""

from pdserve.costmodel.model import INSTANT, PUBLISHED, CostModel

__all__ = ["INSTANT", "PUBLISHED", "CostModel"]
