"""Two cores and their link, in an order that the machine beside this does not try."""

from dataclasses import replace

from pdserve.kvd.client.messages import Accept, Offer
from pdserve.kvd.limits import Limits
from pdserve.kvd.peers.links import LinkLimits
from pdserve.kvd.types import Mode
from tests.unit.kvd.peers_driver import TwoCores

LINKS = LinkLimits(connect=3.0, grace=2.0)


def offered() -> TwoCores:
    """`p1` and `p2` offer a prompt each, for `d` of the other node."""
    cores = TwoCores(Limits(), LINKS)
    for name in ("p1", "p2"):
        cores.engine(0, name)
    cores.engine(1, "d")
    for index, name in enumerate(("p1", "p2"), 1):
        cores.say(0, name, Offer(f"of {name}", bytes([index]) * 16, 0, (1, 2), 32, Mode.READ, 1))
    return cores


def accept(cores: TwoCores, index: int) -> None:
    """`d` accepts the prompt of one of them."""
    ticket = f"p{index}|{Mode.READ.value}".encode()
    blocks = (index * 3, index * 3 + 1)
    cores.say(
        1, "d", Accept(f"d{index}", bytes([index]) * 16, consumer=0, first_block=0, block_ids=blocks, ticket=ticket)
    )


def test_a_peer_that_takes_nothing_any_more_costs_its_link_and_nothing_else() -> None:
    """The link is lost by the very message that comes before an operation: every block of the producers comes back."""
    cores = offered()
    links = cores.sides[0].desk.links
    links._limits = replace(LINKS, max_outbox=2)
    accept(cores, 1)
    accept(cores, 2)
    cores.call()
    cores.answer(0)
    cores.carry()
    (stream,) = cores.streams
    while stream.frames[0]:  # what side 0 answers arrives nowhere: p1 and its operation, then p2
        cores.deliver(stream, 0)
    assert not len(links)
    a = cores.sides[0]
    assert {key: end.reason for key, end in a.ends.items() if key[0] != "d"} == {
        ("p1", "of p1"): "PEER_LOST",
        ("p2", "of p2"): "PEER_LOST",
    }
    assert not len(a.transfers.book.leases)
    assert not a.transfers.book.ops
    assert not a.desk.wanting()[1:], "only the first reader wanted cards"
