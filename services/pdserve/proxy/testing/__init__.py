"""Doubles of what is around the proxy, shipped for tests: scripted legs, and engines without a model."""

from pdserve.proxy.testing.engines import FakeEngine, Handovers, echo_decode, prompt_prefill
from pdserve.proxy.testing.legs import ScriptedLeg, ScriptedLegs

__all__ = ["FakeEngine", "Handovers", "ScriptedLeg", "ScriptedLegs", "echo_decode", "prompt_prefill"]
