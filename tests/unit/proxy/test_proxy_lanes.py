"""What a transport moved the bytes over, in a trace."""

from pdserve.proxy.codec import facts_from_wire, facts_to_wire
from pdserve.proxy.tracing.figures import of_copies, of_transfer
from pdserve.proxy.types import TransferFacts
from pdserve.runtime.telemetry import names

TCP = TransferFacts(kv_bytes=4096, blocks=1, transport="nixl", lanes="tcp/eth0")
SHM = TransferFacts(kv_bytes=4096, blocks=1, transport="shm")


def test_lanes_are_an_attribute_beside_the_transport() -> None:
    """Of the request, of the wait and of kvd's own spans; absent where the transport has no choice."""
    for said in (of_transfer(TCP), of_copies(TCP, 4096)):
        assert (said[names.TRANSPORT], said[names.LANES]) == ("nixl", "tcp/eth0")
    for said in (of_transfer(SHM), of_copies(SHM, 4096)):
        assert said[names.TRANSPORT] == "shm"
        assert names.LANES not in said


def test_they_survive_the_wire() -> None:
    """From the service to the proxy."""
    assert facts_from_wire(facts_to_wire(TCP)) == TCP
