"""Links between daemons: whose call stands, what goes on over another stream, what is lost. No I/O, time by hand."""

from dataclasses import dataclass, field

import pytest

from pdserve.kvd.effects import CancelOp
from pdserve.kvd.peers.link import Link, LinkState
from pdserve.kvd.peers.links import LinkLimits, Links
from pdserve.kvd.peers.messages import ClockOffset, Frame, Greeting
from pdserve.kvd.types import PROTOCOL
from pdserve.rpc.errors import (
    IncompatibleEngines,
    InvalidRequest,
    Overloaded,
    PdserveError,
    PeerLost,
    TicketForged,
    Unavailable,
)

LIMITS = LinkLimits(connect=5, grace=2, backoff_first=0.1, backoff_most=1, max_outbox=8, max_links=3)


@dataclass
class Side:
    """One daemon's links, and what was lost of them."""

    epoch: str
    address: str
    lost: list[tuple[Link, PdserveError]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links = Links(self.epoch, LIMITS, lambda link, error, _: self.lost.append((link, error)), lambda: 1.0)

    def says(self, link: Link | None = None, **more: object) -> Greeting:
        """Its greeting on a link."""
        where = (link.number, link.held, link.received) if link is not None else (0, False, 0)
        known = Greeting(self.epoch, "", PROTOCOL, self.address, self.address, "boot", 0, 0, *where)
        return Greeting(**({name: getattr(known, name) for name in Greeting.__slots__} | more))


def connected(a: Side, b: Side, now: float = 0.0) -> tuple[Link, Link]:
    """`a` calls `b`: their two halves of the link."""
    ours = a.links.towards(b.address, now)
    a.links.dials(now)
    theirs, _, resumed = b.links.hello(a.says(ours), now)
    a.links.welcomed(ours, b.says(theirs, held=resumed), now)
    return ours, theirs


@pytest.fixture
def low() -> Side:
    """The daemon with the lower epoch."""
    return Side("1", "low:1")


@pytest.fixture
def high() -> Side:
    """The other."""
    return Side("2", "high:1")


def frames(link: Link) -> list[Frame]:
    """All that a link has for its stream."""
    found = []
    while (frame := link.frame(link.stream)) is not None:
        found.append(frame)
    return found


def test_where_both_call_the_lower_epochs_call_stands(low: Side, high: Side) -> None:
    """The other one is refused, and takes the call that comes; one link, one stream, nothing lost."""
    mine, theirs = low.links.towards("high:1", 0), high.links.towards("low:1", 0)
    low.links.dials(0)
    high.links.dials(0)
    with pytest.raises(Unavailable) as refused:
        low.links.hello(high.says(theirs), 0)
    high.links.dial_failed(theirs, refused.value, 0)
    met, _, resumed = high.links.hello(low.says(mine), 0)
    low.links.welcomed(mine, high.says(met, held=resumed), 0)
    assert met is theirs
    assert (len(low.links), len(high.links), low.lost, high.lost) == (1, 1, [], [])
    assert (mine.state, theirs.state) == (LinkState.OPEN, LinkState.OPEN)
    assert high.links.dials(10.0) == []


def test_a_call_that_was_overtaken_does_not_undo_the_link(low: Side, high: Side) -> None:
    """A greeting from before the present link is refused, with the link's number; the link stays."""
    stale = high.says(high.links.towards("low:1", 0))
    high.links.dials(0)
    mine, theirs = connected(low, high)
    with pytest.raises(Unavailable) as refused:
        low.links.hello(stale, 0)
    high.links.dial_failed(theirs, refused.value, 0)
    assert (mine.state, theirs.state, low.lost, high.lost) == (LinkState.OPEN, LinkState.OPEN, [], [])


def test_a_row_goes_on_over_another_stream(low: Side, high: Side) -> None:
    """What was taken is not sent again, what was not is; queued words follow."""
    mine, theirs = connected(low, high)
    for op in range(4):
        low.links.send(mine, CancelOp(op), 0)
    sent = frames(mine)
    assert [theirs.take(frame) for frame in sent[:2]] == [CancelOp(0), CancelOp(1)]
    low.links.dropped(mine, mine.stream, 1)
    high.links.dropped(theirs, theirs.stream, 1)
    low.links.send(mine, CancelOp(4), 1)
    assert low.links.dials(1) == [mine]
    again, _, resumed = high.links.hello(low.says(mine), 1.5)
    low.links.welcomed(mine, high.says(again, held=resumed), 1.5)
    assert resumed
    assert again is theirs
    assert [theirs.take(frame) for frame in frames(mine)] == [CancelOp(2), CancelOp(3), CancelOp(4)]
    assert not low.lost
    assert not high.lost


@pytest.mark.parametrize("forgets", ["caller", "listener"])
def test_what_one_side_has_given_up_is_lost_to_the_other(low: Side, high: Side, forgets: str) -> None:
    """Whoever still holds the link hears it with the next stream, and the row begins anew."""
    mine, theirs = connected(low, high)
    low.links.dropped(mine, mine.stream, 0)
    high.links.dropped(theirs, theirs.stream, 0)
    (low if forgets == "caller" else high).links.expire(3.0)
    mine = low.links.towards("high:1", 3.0)
    low.links.send(mine, CancelOp(7), 3.0)
    while mine.state is not LinkState.OPEN:
        assert low.links.dials(3.0) == [mine]
        try:
            met, _, resumed = high.links.hello(low.says(mine), 3.0)
            low.links.welcomed(mine, high.says(met, held=resumed), 3.0)
        except Unavailable as error:
            low.links.dial_failed(mine, error, 3.0)
    assert len(low.lost) == len(high.lost) == 1
    assert mine.number == met.number > 1
    assert [met.take(frame) for frame in frames(mine)] == ([CancelOp(7)] if forgets == "caller" else [])


@pytest.mark.parametrize("who", ["calls", "is called"])
def test_another_daemon_at_the_same_address_is_another_peer(low: Side, high: Side, who: str) -> None:
    """What was open with the old one is lost the moment that the new one is met."""
    mine, _ = connected(low, high)
    low.links.dropped(mine, mine.stream, 0)
    fresh = Side("3", "high:1")
    if who == "calls":
        met, _, resumed = low.links.hello(fresh.says(), 0.1)
    else:
        low.links.dials(0.1)
        theirs, _, resumed = fresh.links.hello(low.says(mine), 0.1)
        low.links.welcomed(mine, fresh.says(theirs, held=resumed), 0.1)
        met = mine
    assert not resumed
    assert [error.reason for _, error in low.lost] == ["PEER_LOST"]
    assert "restarted" in low.lost[0][1].message
    assert (met.epoch, met.state, len(low.links)) == ("3", LinkState.OPEN, 1)


def test_a_link_is_given_up_after_the_grace_and_one_that_never_was_after_its_own_time(low: Side) -> None:
    """Both deadlines are known beforehand, and say why."""
    link = low.links.towards("high:1", 0)
    low.links.dials(0)
    low.links.dial_failed(link, Unavailable("no route"), 0)
    assert low.links.next_deadline() == pytest.approx(0.1)
    low.links.expire(4.9)
    assert not low.lost
    low.links.put_off(1.0)
    low.links.expire(5.9)
    assert not low.lost
    low.links.expire(6.0)
    assert "not reached within 5 s: no route" in low.lost[0][1].message
    assert len(low.links) == 0
    assert low.links.next_deadline() is None


def test_pauses_between_calls_grow_to_a_bound(low: Side) -> None:
    """By the double, and never above a second."""
    link, now, pauses = low.links.towards("high:1", 0), 0.0, []
    for _ in range(6):
        assert low.links.dials(now) == [link]
        low.links.dial_failed(link, Unavailable("no"), now)
        assert link.dial_at is not None
        pauses.append(link.dial_at - now)
        now = link.dial_at
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_a_refusal_that_would_come_again_gives_up_at_once(low: Side) -> None:
    """With the reason of the refusal."""
    link = low.links.towards("high:1", 0)
    low.links.dials(0)
    low.links.dial_failed(link, TicketForged("not of this cluster"), 0)
    assert [error.reason for _, error in low.lost] == ["TICKET_FORGED"]
    assert not len(low.links)


@pytest.mark.parametrize("said", ["9" * 5000, str(1 << 64), "-1", "\u00b2", "a number"])
def test_a_refusal_that_speaks_of_no_link_is_a_call_that_came_to_nothing(low: Side, said: str) -> None:
    """Whoever answers at the address may have said it: it costs a pause, and the link's number stays its own."""
    link = low.links.towards("peer:1", 0)
    low.links.dials(0)
    low.links.dial_failed(link, Unavailable("the call is older than the link", link=said), 0)
    assert (link.number, link.dial_at, link.failures) == (0, 0.1, 1)
    low.links.dials(1)
    low.links.dial_failed(link, Unavailable("the call is older than the link", link="7"), 1)
    assert (link.number, link.dial_at) == (7, 1)


def test_a_peer_that_takes_nothing_is_lost(low: Side, high: Side) -> None:
    """What waits for it is bounded."""
    mine, _ = connected(low, high)
    for op in range(9):
        low.links.send(mine, CancelOp(op), 0)
    assert isinstance(low.lost[0][1], PeerLost)
    assert not len(low.links)


def test_the_number_of_peers_is_bounded(low: Side) -> None:
    """One too many is refused; those that are there stay."""
    for n in range(3):
        low.links.towards(f"peer:{n}", 0)
    with pytest.raises(Overloaded):
        low.links.towards("peer:4", 0)
    assert low.links.towards("peer:0", 0)


def test_a_caller_that_cannot_be_a_peer_is_refused(low: Side, high: Side) -> None:
    """Another protocol, and oneself."""
    with pytest.raises(IncompatibleEngines):
        low.links.hello(high.says(protocol=PROTOCOL + 1), 0)
    with pytest.raises(InvalidRequest):
        low.links.hello(low.says(), 0)
    assert not len(low.links)


def test_what_cannot_be_of_a_row_is_refused(low: Side, high: Side) -> None:
    """A hole, and an acknowledgement of what was never sent; what was taken before is passed over."""
    mine, _ = connected(low, high)
    with pytest.raises(InvalidRequest):
        mine.take(Frame(2, 0, CancelOp(1)))
    with pytest.raises(InvalidRequest):
        mine.take(Frame(1, 5, CancelOp(1)))
    assert mine.take(Frame(1, 0, CancelOp(1))) == CancelOp(1)
    assert mine.take(Frame(1, 0, CancelOp(1))) is None


def test_a_silent_side_says_how_far_it_is(low: Side, high: Side) -> None:
    """So that the other need not keep everything."""
    mine, theirs = connected(low, high)
    for n in range(1, 65):
        theirs.take(Frame(n, 0, CancelOp(n)))
    (frame,) = frames(theirs)
    assert (frame.number, frame.received, frame.message) == (0, 64, None)
    assert frames(theirs) == []
    assert mine.waiting == 0


def test_stamps_are_converted_to_ones_own_clock_and_back() -> None:
    """An absent one stays absent."""
    ahead = ClockOffset(1_000, 0, 5)
    assert ahead.ours(5_000) == 4_000
    assert ahead.seen_from_there.ours(ahead.ours(5_000)) == 5_000
    assert ahead.ours(0) == 0


def speaking(low: Side, high: Side, now: float = 0.0) -> tuple[Link, Link]:
    """The two halves of a link whose sides say that they speak every second."""
    ours = low.links.towards(high.address, now)
    low.links.dials(now)
    theirs, _, resumed = high.links.hello(low.says(ours, beat_ms=1000), now)
    low.links.welcomed(ours, high.says(theirs, held=resumed, beat_ms=1000), now)
    return ours, theirs


def test_a_peer_that_falls_silent_is_held_for_the_grace_and_then_lost(low: Side, high: Side) -> None:
    """From its last word: first its stream is taken for gone, then the link is lost, and why is told."""
    mine, _ = speaking(low, high)
    low.links.heard(mine, 3.0)
    assert low.links.next_deadline() == 9.0
    low.links.expire(8.9)
    assert mine.state is LinkState.OPEN
    low.links.expire(9.0)
    assert (mine.state, low.links.dials(9.0)) == (LinkState.AWAY, [mine])
    low.links.expire(11.0)
    ((lost, error),) = low.lost
    assert (lost, len(low.links)) == (mine, 0)
    assert isinstance(error, PeerLost)
    assert "it has said nothing for 6.0 s" in error.message


def test_a_peer_that_wakes_up_within_the_grace_goes_on(low: Side, high: Side) -> None:
    """Over another stream; nothing is lost."""
    mine, theirs = speaking(low, high)
    low.links.send(mine, CancelOp(1), 0)
    low.links.expire(6.0)
    assert low.links.dials(6.0) == [mine]
    again, _, resumed = high.links.hello(low.says(mine, beat_ms=1000), 7.0)
    low.links.welcomed(mine, high.says(again, held=resumed, beat_ms=1000), 7.0)
    assert (resumed, again, mine.state, low.lost) == (True, theirs, LinkState.OPEN, [])
    low.links.expire(12.9)
    assert mine.state is LinkState.OPEN


def test_who_does_not_say_how_often_it_speaks_may_be_silent_as_long_as_any(low: Side, high: Side) -> None:
    """What a peer says of itself can only make it longer."""
    mine, _ = connected(low, high)
    assert low.links.next_deadline() == 6.0
    assert [state_at(low, mine, now) for now in (5.9, 6.0)] == [LinkState.OPEN, LinkState.AWAY]


def state_at(side: Side, link: Link, now: float) -> LinkState:
    """Where a link is once all that is due has been given up."""
    side.links.expire(now)
    return link.state


def test_time_in_which_this_daemon_stood_still_is_no_silence(low: Side, high: Side) -> None:
    """Nobody could be heard in it."""
    mine, _ = speaking(low, high)
    low.links.put_off(100.0)
    assert [state_at(low, mine, now) for now in (105.9, 106.0)] == [LinkState.OPEN, LinkState.AWAY]


def test_a_peer_that_speaks_seldom_has_three_of_its_pauses(low: Side, high: Side) -> None:
    """Whatever this side would bear."""
    mine, _ = speaking(low, high)
    mine.peer = high.says(beat_ms=10_000)
    assert [state_at(low, mine, now) for now in (29.9, 30.0)] == [LinkState.OPEN, LinkState.AWAY]
