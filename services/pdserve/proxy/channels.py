"""One gRPC channel per engine, dialled when it joins and watched while it is there.

joined ──▶ connecting ──▶ up ──(connection lost)──▶ broken: told at once, closed
              └─ no answer: keeps dialling; an engine is not routable before it is up
"""

import asyncio
from collections.abc import Callable

import grpc
import structlog

from pdserve.proxy.owner import Owner
from pdserve.proxy.types import EngineCard
from pdserve.rpc.channel import CHANNEL_OPTIONS

log = structlog.get_logger(__name__)

OPTIONS = (
    *CHANNEL_OPTIONS,
    # gRPC drops a connection without calls after half an hour; ours says whether the engine lives.
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    # An engine that was restarted at its address must not inherit the pauses of its predecessor's channel.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
GRACE = 5.0
"""Seconds that the open calls of an engine that said bye get to end."""


class Channels:
    """The channels, by engine id."""

    def __init__(self, up: Callable[[str], None], broken: Callable[[str, str], None]) -> None:
        """`up(engine_id)` and `broken(engine_id, reason)` are told of each channel's state."""
        self._up = up
        self._broken = broken
        self._open: dict[str, tuple[grpc.aio.Channel, asyncio.Task[None]]] = {}
        self._owner = Owner()

    def join(self, card: EngineCard) -> None:
        """Dials an engine; known again it keeps its channel."""
        if card.engine_id in self._open:
            return
        channel = grpc.aio.insecure_channel(card.address, options=list(OPTIONS))
        watch = asyncio.create_task(self._watch(card, channel), name=f"watch {card.engine_id}")
        self._open[card.engine_id] = (channel, watch)

    def leave(self, engine_id: str, *, graceful: bool) -> None:
        """Hangs up; open calls fail at once, or after GRACE."""
        found = self._open.pop(engine_id, None)
        if found is None:
            return
        channel, watch = found
        watch.cancel()
        self._owner.start(f"hang up on {engine_id}", self._close(channel, watch, GRACE if graceful else 0.0))

    def get(self, engine_id: str) -> grpc.aio.Channel | None:
        """The channel of an engine that is there."""
        found = self._open.get(engine_id)
        return found[0] if found else None

    async def aclose(self) -> None:
        """Hangs up on all; safe twice."""
        for engine_id in tuple(self._open):
            self.leave(engine_id, graceful=False)
        await self._owner.idle()  # bounded by GRACE

    async def _close(self, channel: grpc.aio.Channel, watch: asyncio.Task[None], grace: float) -> None:
        # The watch has to let go of the channel before it may be closed.
        await asyncio.gather(watch, return_exceptions=True)
        await channel.close(grace or None)

    async def _watch(self, card: EngineCard, channel: grpc.aio.Channel) -> None:
        try:
            reason = await self._until_broken(card, channel)
        except Exception as error:  # unwatched it must not be routed to
            log.error("watch_failed", engine_id=card.engine_id, exc_info=error)
            reason = f"its watch failed: {error!r}"
        self._broken(card.engine_id, reason)

    async def _until_broken(self, card: EngineCard, channel: grpc.aio.Channel) -> str:
        was_up = False
        while True:
            state = channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                was_up = True
                log.info("engine_connected", engine_id=card.engine_id, address=card.address)
                self._up(card.engine_id)
            elif was_up or state is grpc.ChannelConnectivity.SHUTDOWN:
                return state.name  # lost, whatever it does next: a new connection may reach another process
            await channel.wait_for_state_change(state)
