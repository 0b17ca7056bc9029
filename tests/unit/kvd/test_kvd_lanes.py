"""What carried the bytes is in every end: of a transfer within a node, and on both sides of one between two."""

from pdserve.kvd.client.messages import Accept, Offer
from pdserve.kvd.limits import Limits
from pdserve.kvd.peers.links import LinkLimits
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import Mode
from tests.unit.kvd.peers_driver import TwoCores

T = b"transfer-0000001"


def test_within_a_node() -> None:
    """Consumer and producer hear it."""
    driver = CoreDriver(Limits())
    driver.engine("P")
    driver.engine("C")
    driver.offer("P", "p", T, (1,))
    driver.accept("C", "c", T, (2,), "P")
    driver.finish_all()
    facts = [driver.ends[key].facts for key in (("C", "c"), ("P", "p"))]
    assert [(one.transport, one.lanes) for one in facts] == [("hand", "by hand")] * 2


def test_a_copy_that_does_not_tell_leaves_what_an_earlier_one_said() -> None:
    """A transport may name its lanes once; a copy that never got a transport says nothing of it."""
    driver = CoreDriver(Limits())
    driver.engine("P")
    driver.engine("C")
    driver.begin("P", "p", T, Mode.WRITE)
    driver.offer("P", "p", T, (1,), mode=Mode.WRITE)
    driver.accept("C", "c", T, (2,), "P", mode=Mode.WRITE)
    (consumer,) = driver.core.book.transfers[T].consumers.values()
    consumer.transport, consumer.lanes = "hand", "another way"
    for op_id in list(driver.posts):
        driver.posts.pop(op_id)
        driver.core.op_ended(op_id, driver.now, moved=64, ns=1, transport="", lanes="", error="")
    driver.take()
    assert driver.ends["C", "c"].facts.lanes == "another way"


def test_between_two_nodes() -> None:
    """The consumer's daemon has it from its transport, the producer's from the consumer's."""
    cores = TwoCores(Limits(), LinkLimits())
    cores.engine(0, "p")
    cores.engine(1, "d")
    cores.say(0, "p", Offer("of p", T, 0, (1, 2), 32, Mode.READ, 1))
    ticket = f"p|{Mode.READ.value}".encode()
    cores.say(1, "d", Accept("of d", T, consumer=0, first_block=0, block_ids=(3, 4), ticket=ticket))
    cores.call()
    cores.answer(0)
    for _ in range(20):
        cores.carry()
        for stream in cores.streams:
            for side in (0, 1):
                while stream.frames[side]:
                    cores.deliver(stream, side)
        for op_id in list(cores.sides[1].posts):
            cores.finish(1, op_id)
    here, there = cores.sides[1].ends["d", "of d"], cores.sides[0].ends["p", "of p"]
    assert [(one.facts.transport, one.facts.lanes) for one in (here, there)] == [("hand", "by hand")] * 2
