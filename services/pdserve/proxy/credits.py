"""How many KV tokens each engine still has for us. Pure.

    |<----------------------- total ------------------------>|
    |  ours: reserved here  |  foreign  |      available     |

`ours` is exact and needs no beat: it is reserved when a leg is dispatched and returned when the leg
ends. `foreign` is what others use (another proxy, a stranded lease): what the engine's last beat
says is in use, less the most that was ours since the beat before. It may undercount others for one
beat; it never counts ours twice, so that a burst of ours does not block itself until the next beat.
"""

from dataclasses import dataclass

from pdserve.proxy.types import EngineCard


@dataclass(slots=True)
class _Account:
    total: int
    ours: int = 0
    peak: int = 0
    """Most of ours since the last beat."""
    foreign: int = 0
    legs: int = 0
    last_used: int = 0


class Ledger:
    """Reservations of KV tokens by engine. Engines that it was not told of have nothing available."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._uses = 0

    def joined(self, card: EngineCard) -> None:
        """An engine is there; known again it keeps what was reserved."""
        self._accounts.setdefault(card.engine_id, _Account(card.total_kv_tokens))

    def left(self, engine_id: str) -> None:
        """An engine is gone; what was reserved on it is void."""
        self._accounts.pop(engine_id, None)

    def reported(self, engine_id: str, free: int) -> None:
        """The engine's beat says how many tokens of its pool are free."""
        account = self._accounts.get(engine_id)
        if account is not None:
            account.foreign = max(0, account.total - free - account.peak)
            account.peak = account.ours

    def available(self, engine_id: str) -> int:
        """Tokens that may be reserved now; never negative."""
        account = self._accounts.get(engine_id)
        return 0 if account is None else max(0, account.total - account.ours - account.foreign)

    def reserve(self, engine_id: str, tokens: int) -> "Reservation":
        """Takes tokens.

        Raises:
            ValueError: more than is available; ask before.
        """
        account = self._accounts.get(engine_id)
        if account is None or tokens > self.available(engine_id):
            raise ValueError(f"{tokens} tokens asked of {engine_id}, {self.available(engine_id)} available")
        self._uses += 1
        account.ours += tokens
        account.peak = max(account.peak, account.ours)
        account.legs += 1
        account.last_used = self._uses
        return Reservation(account, tokens)

    def reserved(self, engine_id: str) -> int:
        """Tokens of ours on an engine."""
        account = self._accounts.get(engine_id)
        return 0 if account is None else account.ours

    def legs(self, engine_id: str) -> int:
        """Reservations held on an engine."""
        account = self._accounts.get(engine_id)
        return 0 if account is None else account.legs

    def last_used(self, engine_id: str) -> int:
        """Number of the engine's last reservation, counted over all engines; 0: none yet."""
        account = self._accounts.get(engine_id)
        return 0 if account is None else account.last_used


class Reservation:
    """Tokens held on one engine; `release` gives them back, once."""

    def __init__(self, account: _Account, tokens: int) -> None:
        # Bound to the account, not to the id: an engine that left and came back has a new account.
        self._account: _Account | None = account
        self.tokens = tokens

    def release(self) -> bool:
        """Gives the tokens back; false where that was done before."""
        account, self._account = self._account, None
        if account is None:
            return False
        account.ours -= self.tokens
        account.legs -= 1
        return True


def blocks_round_up(tokens: int, block_size: int) -> int:
    """Tokens of the whole blocks that hold `tokens`."""
    return -(-tokens // block_size) * block_size
