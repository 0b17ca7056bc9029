"""The daemon's heart: feeds the core with what comes in, and turns its effects into I/O.

Everything runs on one event loop. An input (message, notice, region, loss, timer, finished copy)
first has a standstill noticed (`_heard`), then calls the core and then `_settle`, which carries out
the effects and sets the alarm again.
"""

import asyncio
import contextlib
import random
import uuid
from collections.abc import Callable, Mapping
from functools import partial

import structlog

from pdserve.kvd.alarm import Alarm
from pdserve.kvd.attachments import Attachments, Member
from pdserve.kvd.callers import allowed
from pdserve.kvd.carrying import Carrying
from pdserve.kvd.client.messages import Hello, Request, Welcome
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.copier import Copier
from pdserve.kvd.counts import Counts
from pdserve.kvd.departures import Departures
from pdserve.kvd.leases import Leases
from pdserve.kvd.notice_socket import NoticeSocket
from pdserve.kvd.notices import Notice
from pdserve.kvd.peers.cards import Cards
from pdserve.kvd.peers.desk import Desk
from pdserve.kvd.peers.network import Network
from pdserve.kvd.probing.devices import read_devices
from pdserve.kvd.probing.loans import Loans
from pdserve.kvd.probing.slot import Slot
from pdserve.kvd.probing.survey import Surroundings, Survey
from pdserve.kvd.regions import Regions
from pdserve.kvd.registry import Registry
from pdserve.kvd.requests import Requests, source
from pdserve.kvd.sessions import Sessions
from pdserve.kvd.transfers import Transfers
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.make import MakeTransports, make_transports
from pdserve.kvd.transport.port import MappedRegion, Moved
from pdserve.kvd.types import RegionKey
from pdserve.kvd.unawaited import Unawaited
from pdserve.rpc.errors import ConfigError, Draining, InvalidRequest
from pdserve.runtime.clock import Clock
from pdserve.runtime.signing import Signer

log = structlog.get_logger(__name__)


class Node:
    """One daemon without its gRPC face. Not safe to share between loops."""

    def __init__(
        self, config: KvdConfig, *, clock: Clock | None = None, transports: MakeTransports = make_transports
    ) -> None:
        """Raises ConfigError where no address range can be reserved."""
        self.config = config
        self.epoch = str(uuid.uuid4())
        self.registry = Registry()
        self.leases = Leases()
        self.transfers = Transfers(self.registry, self.leases, config.limits)
        self.attachments = Attachments(config.grace, config.max_backlog)
        self.counts = Counts()
        self._unawaited = Unawaited()
        self._clock = clock or Clock()
        self.started_at = self.now()
        self._signer = Signer(config.cluster_key.secret)
        try:
            self._arena = Arena()
        except OSError as error:
            raise ConfigError(f"no address range for the regions: {error}") from error
        self.mover = self._arena.mover
        """How host memory is copied."""
        self.transports = tuple(transports(config, self._arena))
        self._regions = Regions(
            config,
            self.registry,
            self._arena,
            self.transports,
            here=self._region_here,
            gone=self._rank_gone,
            defect=self._unawaited.defect,
        )
        check = partial(source, self._signer, self._clock)
        self.desk = Desk(self.epoch, self.transfers, config.peer.limits(config.grace), check, random.random)
        self._requests = Requests(self.transfers, self.desk, check)
        self._departures = Departures(
            self.registry, self.transfers, self.desk, self.attachments, config.grace, self._settle
        )
        self._sessions = Sessions(self.transports, self.mapped.get, self.desk.guests)
        self._copier = Copier(self.registry, self._sessions, self._op_ended, self._unawaited.defect)
        cards = Cards(self.transports, lambda: self.mapped)
        self._probing = Slot(self._unawaited.defect)
        loans = Loans(self._probing, self._arena, self.transports, read_devices)
        self.network = Network(
            config.peer,
            self.desk,
            cards,
            self._signer,
            self._clock,
            epoch=self.epoch,
            heard=self._heard,
            settle=self._settle,
            lend=loans.lend,
            defect=self._unawaited.defect,
        )
        self.survey = Survey(
            self._probing,
            Surroundings(
                self._arena,
                self.transports,
                kinds=lambda: {region.kind for region in self.mapped.values()},
                borrow=self.network.borrow,
                devices=read_devices,
                now=self.now,
            ),
        )
        """Measures the ways to this node's memory."""
        self._changed = asyncio.Event()
        self._carrying = Carrying(
            self.attachments,
            self.desk,
            self._copier,
            self._sessions,
            self._regions,
            cards,
            self.counts,
            self._unawaited.spawn,
            self._changed.set,
        )
        self.notices = NoticeSocket(config.notice_socket, self._notice, allowed(config.allow_uid))
        self._alarm = Alarm(
            self.now,
            config.limits.lease,
            (self.transfers, self.attachments, self.desk),
            ring=self._tick,
            stood_still=self._stood_still,
        )
        self._idle = True
        self._stopping = False
        """The drain is the last one."""
        self._closing = False

    async def start(self) -> None:
        """Opens the memory and notice sockets.

        Raises:
            ConfigError: a socket cannot be bound.
        """
        try:
            self._regions.start()
            self.notices.start()
            await self.network.start()
        except OSError as error:
            await self.aclose()
            raise ConfigError(f"a socket in {self.config.state_dir} cannot be bound: {error}") from error

    async def aclose(self) -> None:
        """Ends every copy, unmaps, and closes the sockets last: whoever sees their end knows that
        nothing of this daemon writes any more. Safe twice."""
        self._closing = True
        self._alarm.close()
        self.notices.close()
        await self._probing.aclose()
        await self.network.aclose()
        await self._regions.stop()
        await self._sessions.aclose()
        await self._copier.aclose()
        await self._unawaited.aclose()
        for transport in self.transports:
            await transport.aclose()
        self._arena.close()
        self._regions.close()

    # -- participants -----------------------------------------------------------------------

    def attach(self, hello: Hello, pid: int) -> tuple[Member, int, Welcome]:
        """A participant's new stream.

        Raises:
            StaleEpoch: its engine has ended.
            IncompatibleEngines: another protocol.
            InvalidRequest: it contradicts another participant, or is one that lives.
        """
        if hello.rank and hello.rank >= hello.ranks:
            raise InvalidRequest(f"rank {hello.rank} of {hello.ranks}")
        now = self._heard()
        self.registry.hello(hello.engine_id, hello.ranks, hello.protocol, hello.identity)
        member, stream = self.attachments.attach(hello, pid, now)
        log.info("attached", engine_id=hello.engine_id, participant=hello.participant.value, rank=hello.rank)
        self.transfers.regions_changed(hello.engine_id, now)
        self._settle()
        return member, stream, self._welcome()

    def _welcome(self) -> Welcome:
        limits = self.config.limits
        return Welcome(
            kvd_epoch=self.epoch,
            notice_endpoint=f"ipc://{self.config.notice_socket}",
            memory_socket=str(self.config.memory_socket),
            lease_s=limits.lease,
            renew_s=limits.renew,
            fence_s=limits.fence,
            peer_address=self.desk.address,
            draining=self.transfers.draining,
        )

    def detach(self, member: Member, stream: int) -> None:
        """A stream is gone; its participant may come back within the grace."""
        if self.attachments.detach(member, stream, self._heard()) and not self._closing:
            log.info("detached", engine_id=member.engine_id, participant=member.kind.value, rank=member.rank)
            entry = self.registry.get(member.engine_id)
            if entry is None or entry.ended:
                self.attachments.forget(member.engine_id)
            self._settle()

    def handle(self, engine_id: str, message: Request) -> None:
        """One message of a participant.

        Raises:
            StaleEpoch: its engine has ended.
            InvalidRequest: it cannot be carried out and belongs to no handle that could be told.
        """
        now = self._heard()
        try:
            self._requests.take(engine_id, message, now)
        finally:
            self._settle()

    async def drained(self, deadline: float, *, stopping: bool = False) -> int:
        """Takes no new transfers from now on; how many are still open when none is, after at most
        `deadline` seconds, or when the drain is undone. `stopping`: it is not to be undone."""
        self._stopping = self._stopping or stopping
        self._drain(draining=True)
        with contextlib.suppress(TimeoutError):  # the number says it
            await self.until(lambda: not self.transfers.open or not self.transfers.draining, deadline)
        return self.transfers.open

    def undrain(self) -> None:
        """Takes new transfers again.

        Raises:
            Draining: the daemon is about to stop.
        """
        if self._stopping:
            raise Draining("kvd is about to stop: the drain cannot be undone")
        self._drain(draining=False)

    def _drain(self, *, draining: bool) -> None:
        if self.transfers.draining is not draining:
            self.transfers.draining = draining
            self.attachments.tell_hosts(self._welcome(), self._heard())  # they begin nothing that would be refused
        self._changed.set()

    async def until(self, true: Callable[[], bool], timeout: float) -> None:
        """Waits for something about this node to become true.

        Raises:
            TimeoutError: not within `timeout` seconds.
        """
        async with asyncio.timeout(timeout):
            while not true():
                self._changed.clear()
                await self._changed.wait()

    @property
    def defects(self) -> int:
        """Errors that only a defect of kvd explains, such as books that do not add up; 0 in a good one."""
        return self._unawaited.defects

    def defect(self, error: BaseException) -> None:
        """Logs and counts one that was met at a door of this node."""
        self._unawaited.defect(error)

    # -- memory and notices -----------------------------------------------------------------

    @property
    def mapped(self) -> Mapping[RegionKey, MappedRegion]:
        """The memory that is here."""
        return self._regions.mapped

    def _region_here(self, key: RegionKey) -> None:
        now = self._heard()
        self.transfers.regions_changed(key.engine_id, now)
        self.desk.regions_changed(key.engine_id, now)
        self._settle()

    def _rank_gone(self, key: RegionKey) -> None:
        if not self._closing:
            with self._unawaited.watched():
                self._departures.ended(key.engine_id, f"rank {key.rank} is gone", self._heard())

    def _notice(self, notice: Notice) -> None:
        with self._unawaited.watched():
            self._regions.announced(notice)
            taken = self.transfers.notice(notice, self._heard())
            self.counts.notice(taken=taken)
            if not taken:
                log.debug("notice_ignored", engine_id=notice.engine_id, rank=notice.rank)
            self._settle()

    # -- effects ----------------------------------------------------------------------------

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()

    def _settle(self) -> None:
        deaf: list[Member] = []
        while effects := self.transfers.take():
            for effect in effects:
                deaf.extend(self._carrying.carry_out(effect, self.now()))
            while deaf:
                member = deaf.pop()
                self._departures.over(member.engine_id, f"its {member.kind.value} does not read", self.now())
        idle = not self.transfers.open
        if idle and not self._idle:
            with self._unawaited.watched():
                self.transfers.check()
        self._idle = idle
        self._changed.set()
        self.network.kick(self.now())
        if not self._closing:
            self._alarm.set()

    def _op_ended(self, op_id: int, moved: Moved, transport: str, error: str) -> None:
        with self._unawaited.watched():
            self.counts.copy(moved, self.transfers.mode_of(op_id), transport, error)
            now, nbytes, ns, lanes = self._heard(), moved.nbytes, moved.ns, moved.lanes
            if not self.desk.op_ended(op_id, now, moved=nbytes, ns=ns, transport=transport, lanes=lanes, error=error):
                self.transfers.op_ended(op_id, now, moved=nbytes, ns=ns, transport=transport, lanes=lanes, error=error)
            if not self._closing:
                self._settle()

    # -- time -------------------------------------------------------------------------------

    def _heard(self) -> float:
        return self._alarm.heard()

    def _stood_still(self, seconds: float) -> None:
        self.transfers.stood_still(seconds)
        self.attachments.put_off(seconds)
        self.desk.put_off(seconds)

    def _tick(self) -> None:
        now = self._heard()
        self._alarm.rang()
        with self._unawaited.watched():
            self.transfers.expire(now)
            self.desk.expire(now)
            for member in self.attachments.overdue(now):
                self._departures.grace_over(member, now)
        with self._unawaited.watched():
            self._settle()
