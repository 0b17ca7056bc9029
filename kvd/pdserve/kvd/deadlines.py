"""What happens when time runs out, and how two full pools are kept from waiting for each other. Pure."""

from pdserve.kvd.book import Book, Timer
from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.effects import Note, Stop
from pdserve.kvd.endings import Endings
from pdserve.kvd.ends import Transfer
from pdserve.kvd.states import Producer
from pdserve.rpc.errors import TieBroken, TransferExpired


class Deadlines:
    """See the module."""

    def __init__(self, book: Book, endings: Endings) -> None:
        self._book = book
        self._endings = endings

    def expire(self, now: float) -> None:
        """Does everything that is due at `now`."""
        while (timer := self._book.timers.pop_due(now)) is not None:
            transfer = self._book.transfers.get(timer.transfer_id)
            if timer.kind == "tie":
                self._tie(timer.engine_id, now)
            elif timer.kind == "orphan":
                self._book.orphans.pop((timer.engine_id, timer.handle), None)
            elif transfer is not None:
                self._due(timer, transfer, now)

    def _due(self, timer: Timer, transfer: Transfer, now: float) -> None:
        limits, expired = self._book.limits, self._book.expired
        if timer.kind not in ("pfence", "cfence"):
            expired[timer.kind] = expired.get(timer.kind, 0) + 1
        match timer.kind:
            case "lease":
                self._expire(transfer, f"the producer's lease of {limits.lease} s was not renewed", now)
            case "accept":
                self._expire(transfer, f"not accepted within {limits.accept} s of the offer", now)
            case "park":
                self._expire(transfer, f"its producer was not heard of within {limits.park} s", now)
            case "pfence":
                self._endings.fence_overdue(transfer, None, now)
            case "cfence":
                self._endings.fence_overdue(transfer, transfer.consumers[timer.consumer], now)
            case "transfer":
                detail = f"not landed within {limits.transfer} s of offer and accept"
                stop = Stop(Outcome.EXPIRED, TransferExpired.reason, detail)
                self._book.out.append(Note("transfer_expired", transfer.transfer_id, (("detail", detail),)))
                self._endings.stop_consumer(transfer, transfer.consumers[timer.consumer], stop, stop, now)

    def _expire(self, transfer: Transfer, detail: str, now: float) -> None:
        self._book.out.append(Note("transfer_expired", transfer.transfer_id, (("detail", detail),)))
        stop = Stop(Outcome.EXPIRED, TransferExpired.reason, detail)
        self._endings.stop_transfer(transfer, stop, stop, now)

    # -- ties -------------------------------------------------------------------------------
    # Engine P has offered what nobody accepts (the consumer's pool is full), and the consumer has
    # accepted what P has not offered (P's pool is full with its offers): nothing moves any more.

    def watch(self, transfer: Transfer, now: float) -> None:
        """Looks for a tie later, where this transfer could be one half of one."""
        if self._unaccepted(transfer) or self._unoffered(transfer):
            timer = Timer("tie", engine_id=transfer.source_engine)
            if self._book.timers.get(timer) is None:
                self._book.timers.set(timer, now + self._book.limits.tie)

    def _tie(self, engine_id: str, now: float) -> None:
        mine = list(self._book.by_engine.get(engine_id, {}).values())
        offered = [t for t in mine if t.source_engine == engine_id and self._unaccepted(t)]
        waiting = [t for t in mine if t.source_engine == engine_id and self._unoffered(t)]
        if not offered or not waiting:
            return
        quiet_at = self._book.touched.get(engine_id, now) + self._book.limits.tie
        if quiet_at <= now:
            youngest = max(offered, key=lambda t: t.created_at)
            detail = (
                f"nothing moved for {self._book.limits.tie} s; {len(waiting)} accepted transfers wait for its blocks"
            )
            self._book.out.append(Note("tie_broken", youngest.transfer_id, (("waiting", len(waiting)),)))
            stop = Stop(Outcome.CANCELLED, TieBroken.reason, detail)
            self._endings.stop_transfer(youngest, stop, stop, now)
            self._wait_anew([t for t in (*offered, *waiting) if t is not youngest], now)
            self._book.touched[engine_id] = now
            quiet_at = now + self._book.limits.tie
        self._book.timers.set(Timer("tie", engine_id=engine_id), quiet_at)

    def _wait_anew(self, transfers: list[Transfer], now: float) -> None:
        """Their wait was the tie's fault: without this, a row of ties lets the oldest expire."""
        limits = self._book.limits
        for transfer in transfers:
            for timer, seconds in (
                (Timer("accept", transfer.transfer_id), limits.accept),
                (Timer("park", transfer.transfer_id), limits.park),
            ):
                if self._book.timers.get(timer) is not None:
                    self._book.timers.set(timer, now + seconds)

    @staticmethod
    def _unaccepted(transfer: Transfer) -> bool:
        end = transfer.producer
        return end is not None and end.state is Producer.COMPLETE and not transfer.all_came

    @staticmethod
    def _unoffered(transfer: Transfer) -> bool:
        end = transfer.producer
        computing = end is None or end.state is Producer.COMPUTING
        return computing and any(not c.terminal for c in transfer.consumers.values())
