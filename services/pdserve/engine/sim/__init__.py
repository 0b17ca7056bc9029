"""The simulated engine: everything an engine does to KV and hand-overs, and no model."""

from pdserve.engine.sim.config import SimConfig
from pdserve.engine.sim.engine import SimEngine

__all__ = ["SimConfig", "SimEngine"]
