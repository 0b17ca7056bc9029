"""Doubles of what is around the proxy, shipped for tests: scripted legs, a driver, engines without a model, traces."""

from pdserve.proxy.testing.engines import FakeEngine, Handovers, echo_decode, prompt_prefill
from pdserve.proxy.testing.legs import ScriptedLeg, ScriptedLegs
from pdserve.proxy.testing.rig import Rig, Running
from pdserve.proxy.testing.traces import TraceSink

__all__ = [
    "FakeEngine",
    "Handovers",
    "Rig",
    "Running",
    "ScriptedLeg",
    "ScriptedLegs",
    "TraceSink",
    "echo_decode",
    "prompt_prefill",
]
