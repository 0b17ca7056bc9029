"""What the services need to know of hand-overs: how each end ends, and a way to give one up."""

from typing import Protocol

from pdserve.kvd.client.messages import End


class Watch(Protocol):
    """One end of one transfer, watched. kvd is told that it is still wanted while it is watched."""

    @property
    def result(self) -> End | None:
        """The end, once it has come."""
        ...

    async def end(self, timeout: float) -> End:
        """Waits for the end, at most `timeout` seconds. May be asked by several at once.

        Raises:
            DeadlinePassed: it did not come in time.
        """
        ...

    def close(self) -> None:
        """Watches no longer; safe twice."""
        ...


class Handoffs(Protocol):
    """The kvd of this node, as the host of one engine sees it."""

    def register(self, transfer_id: bytes, consumer: int | None) -> Watch:
        """Watches the producer's end (`consumer` None), or that of one consumer.

        Begun before the engine is asked, so that no end can be missed.

        Raises:
            KvdUnavailable: the daemon cannot be reached now, or it drains and this is a producer.
            TransferUsed: this end is being watched already.
        """
        ...

    def cancel(self, transfer_id: bytes, reason: str) -> None:
        """Gives a transfer up, with a reason of pdserve.rpc.errors; never blocks, unknown ids are welcome."""
        ...
