"""What a daemon that did not run for a while does with its deadlines, those that it had and the first ones afterwards.

The clock is the test's: it jumps, as after SIGSTOP. The node has no sockets; the test says what they would.
"""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pdserve.kvd.attachments import Attachments
from pdserve.kvd.book import Timer
from pdserve.kvd.client.messages import Accept, Begin, Hello, Offer, Outcome, Participant, Renew
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.effects import Post
from pdserve.kvd.limits import Limits
from pdserve.kvd.node import Node
from pdserve.kvd.notices import StepEnd
from pdserve.kvd.registry import Region
from pdserve.kvd.testing import CoreDriver, plain_layout
from pdserve.kvd.transfers import Source
from pdserve.kvd.transport.port import Moved
from pdserve.kvd.types import PROTOCOL, MemoryKind, Mode, RegionKey
from pdserve.rpc.errors import StaleEpoch
from pdserve.runtime.clock import Clock

T, U, V = b"transfer-0000001", b"transfer-0000002", b"transfer-0000003"
LIMITS = Limits(lease=30, accept=10, transfer=30, fence=5, park=20, tie=2)
AWAY = 100.0
"""Longer than every deadline."""


class Jumping(Clock):
    """Stands, but for what the test adds."""

    at = 1000.0

    def monotonic(self) -> float:
        """See Clock."""
        return self.at


@pytest.fixture
def driver() -> CoreDriver:
    """The core with a producer P and a consumer C."""
    made = CoreDriver(LIMITS)
    made.engine("P")
    made.engine("C")
    return made


@pytest.fixture
def clock() -> Jumping:
    """The node's."""
    return Jumping()


@pytest.fixture
async def node(tmp_path: Path, clock: Jumping) -> AsyncIterator[Node]:
    """A node with P's scheduler and one transfer of it."""
    made = Node(KvdConfig(tmp_path, limits=LIMITS, grace=2.0), clock=clock)
    made.attach(hello("P"), 1)
    made.handle("P", Begin("p", T, Mode.WRITE, 1))
    yield made
    assert made.defects == 0
    await made.aclose()


def hello(engine: str, kind: Participant = Participant.SCHEDULER) -> Hello:
    """One of an engine with a single rank."""
    return Hello(engine, kind, {"model": "m"}, protocol=PROTOCOL)


def due(node: Node, transfer_id: bytes) -> float | None:
    """When a transfer's lease is over."""
    return node.transfers.book.timers.get(Timer("lease", transfer_id))


def stand_still(driver: CoreDriver, seconds: float) -> None:
    """As a node sees it: the time is another one, and the core hears of that first."""
    driver.now += seconds
    driver.core.stood_still(seconds)
    driver.advance(0)


async def test_what_is_heard_first_gets_its_deadlines_from_now(node: Node, clock: Jumping) -> None:
    """The old lease is postponed by the standstill; the first new transfer's is a lease from now, and no more."""
    clock.at += AWAY
    node.handle("P", Begin("q", U, Mode.WRITE, 1))
    assert due(node, U) == clock.at + LIMITS.lease
    old = due(node, T)
    assert old is not None
    assert clock.at < old <= clock.at + 2 * LIMITS.lease
    clock.at += 0.5
    node.handle("P", Renew((T, U)))
    assert due(node, T) == due(node, U) == clock.at + LIMITS.lease


async def test_a_renewal_that_is_heard_first_is_no_longer_than_others(node: Node, clock: Jumping) -> None:
    """The deadline and the lease that operators are shown say the same: a lease from now."""
    clock.at += AWAY
    node.handle("P", Renew((T,)))
    assert due(node, T) == clock.at + LIMITS.lease
    assert [lease.expires_at for lease in node.leases] == [clock.at + LIMITS.lease]


def _attach(node: Node) -> None:
    node.attach(hello("P", Participant.WORKER), 1)


def _detach(node: Node) -> None:
    (member,) = node.attachments.of("P")
    node.detach(member, 1)
    assert node.attachments.next_deadline() == node.now() + 2.0


def _notice(node: Node) -> None:
    node.notices._hear(StepEnd("P", 0, 1))  # what its socket calls with a message


def _renew(node: Node) -> None:
    node.handle("P", Renew((T,)))


def _refused(node: Node) -> None:
    with pytest.raises(StaleEpoch):
        node.handle("nobody", Begin("n", V, Mode.WRITE, 1))


def _memory(node: Node) -> None:
    node.registry.add_region("P", 0, Region(4 * 64, MemoryKind.HOST, plain_layout(4, 1, 64)))
    node._region_here(RegionKey("P", 0))  # what `regions` calls with memory that it has mapped


def _death(node: Node) -> None:
    node._rank_gone(RegionKey("P", 0))


def _copied(node: Node) -> None:
    for engine in ("P", "C"):
        node.registry.hello(engine, 1, PROTOCOL, {"model": "m"})
        node.registry.add_region(engine, 0, Region(4 * 64, MemoryKind.HOST, plain_layout(4, 1, 64)))
    node.transfers.offer("P", Offer("r", U, 0, (1,), 1, Mode.READ), node.now())
    node.transfers.accept("C", Accept("c", U, 0, (2,), 0), Source("P", Mode.READ, {"model": "m"}), node.now())
    (post,) = [effect for effect in node.transfers.take() if isinstance(effect, Post)]
    node._op_ended(post.op_id, Moved(64, 1), "hand", "")  # what the copier calls


@pytest.mark.parametrize("what", [_attach, _detach, _notice, _renew, _refused, _memory, _copied, _death])
async def test_whatever_is_heard_first_has_the_standstill_noticed(
    node: Node, clock: Jumping, what: Callable[[Node], None]
) -> None:
    """By any door, before the core is asked: what it notes is of now, and is not moved by what comes next."""
    clock.at += AWAY
    with capture_logs() as logs:
        what(node)
        assert [entry["event"] for entry in logs if entry["event"] == "stood_still"] == ["stood_still"]
        if what is not _death:
            before = node.transfers.next_deadline(), node.attachments.next_deadline(), dict(node.transfers.book.touched)
            node._tick()
            assert before == (
                node.transfers.next_deadline(),
                node.attachments.next_deadline(),
                dict(node.transfers.book.touched),
            )


async def test_a_grace_does_not_run_on_while_kvd_stands_still(node: Node, clock: Jumping) -> None:
    """A participant that is without a stream when kvd is stopped has the rest of its grace when kvd goes on: its
    engine's transfers are not lost for a time in which nobody could have come back."""
    member, stream = node.attachments.attach(hello("P"), 1, clock.at)
    node.detach(member, stream)
    clock.at += AWAY
    node._tick()  # what the loop calls, late
    assert T in node.transfers.book.transfers
    left = node.attachments.next_deadline()
    assert left is not None
    assert clock.at < left
    clock.at = left
    node._tick()
    assert T not in node.transfers.book.transfers


async def test_one_standstill_is_noticed_once(node: Node, clock: Jumping) -> None:
    """Nothing is postponed again by what comes next, be it the timer that was late."""
    clock.at += AWAY
    node.handle("P", Begin("q", U, Mode.WRITE, 1))
    before = due(node, T), due(node, U)
    clock.at += 0.5
    node.handle("P", Begin("r", V, Mode.WRITE, 1))
    node._tick()
    assert (due(node, T), due(node, U)) == before
    assert due(node, V) == clock.at + LIMITS.lease


async def test_a_loop_that_is_a_little_late_postpones_nothing(node: Node, clock: Jumping) -> None:
    """Less than a third of a lease after its time a timer is only late, and what is due is due."""
    clock.at += LIMITS.lease + 1
    node._tick()
    assert T not in node.transfers.book.transfers


def test_a_standstill_takes_nothing_from_a_lease(driver: CoreDriver) -> None:
    """What was left of it before is left after; then it runs out as ever."""
    driver.begin("P", "p", T)
    driver.advance(29)
    stand_still(driver, AWAY)
    driver.advance(0.9)
    assert not driver.ends
    driver.advance(0.2)
    assert driver.ends["P", "p"].outcome is Outcome.EXPIRED


def test_a_standstill_breaks_no_tie_that_is_none(driver: CoreDriver) -> None:
    """A producer whose last notice came just before the standstill has been quiet for no longer than it could speak."""
    driver.offer("P", "p", T, (1,))
    driver.accept("C", "c", U, (5,), "P", mode=Mode.WRITE)
    driver.advance(1.5)
    driver.step("P", 1)
    stand_still(driver, AWAY)
    driver.advance(1.9)
    assert not driver.ends
    driver.advance(0.2)
    assert driver.ends["P", "p"].reason == "TIE_BROKEN"


def test_put_off_is_for_those_who_are_away() -> None:
    """Every grace that runs ends later by as much; a later loss has the usual one."""
    attachments = Attachments(grace=2, max_backlog=10)
    first, stream = attachments.attach(hello("P"), 1, 0.0)
    second, other = attachments.attach(hello("P", Participant.WORKER), 1, 0.0)
    attachments.detach(first, stream, 10)
    attachments.put_off(100)
    attachments.detach(second, other, 111)
    assert attachments.next_deadline() == 112
    assert attachments.overdue(112) == [first]
    assert attachments.overdue(113) == [second]
    assert first.lost_at == 10
