"""The core alone: time, copies and engines by hand, and a model of what every block holds."""

from pdserve.kvd.client.messages import Accept, Begin, End, Fenced, Offer, Retract
from pdserve.kvd.effects import CancelOp, Effect, Note, Post, TearDown, Tell, Unmap
from pdserve.kvd.leases import Leases
from pdserve.kvd.limits import Limits
from pdserve.kvd.notices import Chunk, LayerReady, StepBegin, StepEnd
from pdserve.kvd.registry import Region, Registry
from pdserve.kvd.testing.engine import plain_layout
from pdserve.kvd.transfers import Source, Transfers
from pdserve.kvd.types import PROTOCOL, MemoryKind, Mode

Place = tuple[str, int, int, int]
"""engine, rank, layer, block."""


class CoreDriver:
    """Calls the core as a node would. `contents` says what is where: set it for a producer's
    blocks, and a copy that is finished carries it over."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now = 100.0
        self.registry = Registry()
        self.leases = Leases()
        self.core = Transfers(self.registry, self.leases, limits or Limits())
        self.posts: dict[int, Post] = {}
        """In flight."""
        self.posted: list[Post] = []
        self.cancelled: set[int] = set()
        self.torn: set[int] = set()
        self.ends: dict[tuple[str, str], End] = {}
        self.told_again: list[tuple[str, str]] = []
        """Handles whose end was asked for again."""
        self.fenced: list[tuple[str, Fenced]] = []
        self.unmapped: list[str] = []
        self.notes: list[Note] = []
        self.contents: dict[Place, object] = {}

    def engine(
        self,
        engine_id: str,
        *,
        ranks: int = 1,
        layers: int = 2,
        blocks: int = 16,
        model: str = "m",
        block_size: int = 16,
        mapped: bool = True,
    ) -> str:
        """A running engine, with its memory unless `mapped` is false; gives its id back."""
        self.registry.hello(engine_id, ranks, PROTOCOL, {"model": model})
        if mapped:
            for rank in range(ranks):
                self.region(engine_id, rank, layers=layers, blocks=blocks, block_size=block_size)
        return engine_id

    def region(self, engine_id: str, rank: int, *, layers: int = 2, blocks: int = 16, block_size: int = 16) -> None:
        """A rank's memory comes."""
        layout = plain_layout(blocks, layers, 64, block_size)
        self.registry.add_region(engine_id, rank, Region(blocks * layers * 64, MemoryKind.HOST, layout))
        self.core.regions_changed(engine_id, self.now)
        self.take()

    # -- messages ---------------------------------------------------------------------------

    def begin(self, engine: str, handle: str, tid: bytes, mode: Mode = Mode.WRITE, consumers: int = 1) -> None:
        """A producer begins."""
        self.core.begin(engine, Begin(handle, tid, mode, consumers), self.now)
        self.take()

    def offer(
        self,
        engine: str,
        handle: str,
        tid: bytes,
        blocks: tuple[int, ...],
        *,
        mode: Mode = Mode.READ,
        attempt: int = 0,
        consumers: int = 1,
    ) -> None:
        """A producer offers."""
        self.core.offer(engine, Offer(handle, tid, attempt, blocks, len(blocks), mode, consumers, 7), self.now)
        self.take()

    def accept(
        self,
        engine: str,
        handle: str,
        tid: bytes,
        blocks: tuple[int, ...],
        source: str,
        *,
        mode: Mode = Mode.READ,
        consumer: int = 0,
        first: int = 0,
        model: str = "m",
    ) -> None:
        """A consumer accepts with a good ticket or locator."""
        message = Accept(handle, tid, consumer, blocks, first, stamped_ns=9)
        self.core.accept(engine, message, Source(source, mode, {"model": model}), self.now)
        self.take()

    def retract(self, engine: str, handle: str, attempt: int = 0, *, final: bool, reason: str = "CANCELLED") -> None:
        """A producer takes its blocks back."""
        self.core.retract(engine, Retract(handle, attempt, final, reason), self.now)
        self.take()

    def cancel(self, tid: bytes, reason: str = "CANCELLED") -> None:
        """Anybody gives the transfer up."""
        self.core.cancel(tid, reason, self.now)
        self.take()

    def step(
        self, engine: str, number: int, *chunks: Chunk, rank: int = 0, layers: tuple[int, ...] = (), end: bool = True
    ) -> None:
        """One rank's notices of a step."""
        self.core.notice(StepBegin(engine, rank, number, chunks), self.now)
        for layer in layers:
            self.core.notice(LayerReady(engine, rank, number, layer), self.now)
        if end:
            self.core.notice(StepEnd(engine, rank, number), self.now)
        self.take()

    # -- from below -------------------------------------------------------------------------

    def finish(self, op_id: int, error: str = "") -> None:
        """An operation ends: with everything copied, or with an error and nothing copied."""
        post = self.posts.pop(op_id)
        if not error:
            for layer in post.layers:
                for src, dst in zip(post.src_blocks, post.dst_blocks, strict=True):
                    what = self.contents.get((post.src.engine_id, post.src.rank, layer, src))
                    self.contents[post.dst.engine_id, post.dst.rank, layer, dst] = what
        moved = 0 if error else 64 * len(post.layers) * len(post.src_blocks)
        self.core.op_ended(op_id, self.now, moved=moved, ns=1, transport="hand", lanes="by hand", error=error)
        self.take()

    def finish_all(self) -> None:
        """Every operation in flight ends well, but for those asked to end early."""
        while self.posts:
            op_id = min(self.posts)
            self.finish(op_id, "cancelled" if op_id in self.cancelled else "")

    def die(self, engine: str) -> None:
        """An engine's memory socket ends."""
        self.core.engine_ended(engine, "died", self.now)
        self.take()

    def advance(self, seconds: float) -> None:
        """Time passes, deadline by deadline."""
        until = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.core.expire(self.now)
            self.take()
        self.now = until

    def take(self) -> None:
        """Carries the effects out on the model.

        Raises:
            AssertionError: a handle ended twice, or an operation works on blocks it must not.
        """
        for effect in self.core.take():
            self._take(effect)
        self.core.check()

    def _take(self, effect: Effect) -> None:
        match effect:
            case Tell(engine_id, End() as end):
                key = (engine_id, end.handle)
                if effect.again:
                    assert self.ends[key] == end
                    self.told_again.append(key)
                    return
                assert key not in self.ends, f"{key} ended twice: {self.ends[key]} and {end}"
                self.ends[key] = end
            case Tell(engine_id, Fenced() as fenced):
                self.fenced.append((engine_id, fenced))
            case Post():
                assert effect.op_id not in self.posts
                self.posts[effect.op_id] = effect
                self.posted.append(effect)
            case CancelOp():
                self.cancelled.add(effect.op_id)
            case TearDown():
                self.torn.update(effect.op_ids)
            case Unmap():
                assert not [p for p in self.posts.values() if effect.engine_id in (p.src.engine_id, p.dst.engine_id)]
                self.unmapped.append(effect.engine_id)
            case Note():
                self.notes.append(effect)
