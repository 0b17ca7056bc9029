"""What a hosted engine says about itself in each beat."""

from collections.abc import Callable

from pdserve.engine.hosting.peers import Peers
from pdserve.engine.port import Engine
from pdserve.runtime.beats import Beat, Role, State
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import split_address


class Announcer:
    """Makes beats of one engine."""

    def __init__(
        self,
        engine: Engine,
        peers: Peers,
        clock: Clock,
        role: Role,
        grpc_address: str,
        locator_seconds: float,
        kvd_draining: Callable[[], bool] = bool,
    ) -> None:
        """`grpc_address`: under which the proxy reaches the service. `locator_seconds`: life of the
        locator in each beat. `kvd_draining`: whether its kvd takes no new hand-overs now."""
        self._engine = engine
        self._peers = peers
        self._clock = clock
        self._role = role
        self._address = grpc_address
        self._locator_seconds = locator_seconds
        self._kvd_draining = kvd_draining

    def beat(self, state: State, sequence: int) -> Beat:
        """The beat with this number, from what is true now."""
        info, load, now = self._engine.info, self._engine.load(), self._clock.unix()
        host, _ = split_address(self._address)
        return Beat(
            type="P" if self._role == "prefill" else "D",
            http_address=self._address,
            zmq_address=f"host:{host},handshake:0,notify:0",
            dp_size=1,
            tp_size=info.ranks,
            transfer_mode="READ",
            engine_id=info.engine_id,
            grpc_address=self._address,
            locator=self._peers.our_locator(now + self._locator_seconds),
            model=info.model,
            tokenizer=info.tokenizer,
            role=self._role,
            identity=dict(info.identity),
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            total_kv_tokens=load.total_kv_tokens,
            free_kv_tokens=load.free_kv_tokens,
            running=load.running,
            waiting=load.waiting,
            steps=load.steps,
            state=state,
            beat=sequence,
            sent_at=now,
            vocab_size=info.vocab_size,
            layout=info.layout,
            kvd_draining=self._kvd_draining(),
        )
