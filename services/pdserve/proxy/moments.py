"""When one attempt does what, noted as it goes on. Pure: the times are given."""

from dataclasses import dataclass, field

from pdserve.proxy.course import DECODES, PREFILLS, Course, Side, on_our_clock
from pdserve.proxy.legs import Done, Ready, Tokens
from pdserve.proxy.parts import Point
from pdserve.proxy.types import Progress, Stamps


@dataclass(frozen=True, slots=True)
class Told:
    """What the legs of an attempt have said by its end."""

    ready: Ready | None
    done: Done | None
    prefill_progress: Progress | None
    decode_progress: Progress | None


@dataclass(slots=True)
class Moments:
    """Monotonic nanoseconds of the proxy; 0 where something has not happened."""

    began_ns: int
    """Its engines were chosen."""
    dispatched_ns: int = 0
    """Its legs are being opened; for the driver to say."""
    prefill_sent_ns: int = 0
    ready_ns: int = 0
    prefill_failed_ns: int = 0
    decode_sent_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    decode_failed_ns: int = 0
    first_byte_ns: int = 0
    """Its first token was written to the client; for the driver to say."""
    ended_ns: int = 0
    decode_stamps: Stamps = field(default_factory=Stamps)
    """That came with its first token."""

    def token(self, tokens: Tokens, now_ns: int) -> None:
        """Decode's next tokens are here."""
        self.last_token_ns = now_ns
        if not self.first_token_ns:
            self.first_token_ns = now_ns
            self.decode_stamps = tokens.stamps or Stamps()

    def course(self, told: Told, boot_id: str) -> Course:
        """All of it, on the clock of the host with this `boot_id`, which is ours."""
        prefill, decode = self._prefill(told, boot_id), self._decode(told, boot_id)
        points = {**prefill.at, **decode.at}
        if self.first_token_ns:
            points[Point.TOKEN_RECEIVED] = self.first_token_ns
        facts = told.done.facts if told.done is not None else None
        if facts is None and told.decode_progress is not None:
            facts = told.decode_progress.facts
        return Course(
            began_ns=self.began_ns,
            dispatched_ns=self.dispatched_ns,
            first_byte_ns=self.first_byte_ns,
            last_token_ns=self.last_token_ns,
            ended_ns=self.ended_ns,
            points=points,
            unseen=prefill.unseen | decode.unseen,
            prefill_clock=prefill.clock,
            decode_clock=decode.clock,
            facts=on_our_clock(facts, decode.clock) if facts is not None else None,
        )

    def _prefill(self, told: Told, boot_id: str) -> Side:
        if not self.prefill_sent_ns:
            return Side()
        if told.ready is not None:
            return Side.heard(told.ready.stamps, PREFILLS, boot_id, self.prefill_sent_ns, self.ready_ns)
        return Side.failed(told.prefill_progress, PREFILLS, boot_id, self.prefill_sent_ns, self.prefill_failed_ns)

    def _decode(self, told: Told, boot_id: str) -> Side:
        if not self.decode_sent_ns:
            return Side()
        if self.first_token_ns:
            return Side.heard(self.decode_stamps, DECODES, boot_id, self.decode_sent_ns, self.first_token_ns)
        return Side.failed(told.decode_progress, DECODES, boot_id, self.decode_sent_ns, self.decode_failed_ns)
