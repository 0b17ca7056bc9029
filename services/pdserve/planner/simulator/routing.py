"""Which engines serve a request: the proxy's rules, on a simulated fleet. Pure.

Least load is what `pdserve.proxy.routing` and its ledger do: credits are KV tokens, reserved at
dispatch and given back when the leg ends; the engine with the most left is chosen, and a request
waits where none has enough. Block rounding and missed beats have no counterpart here.
"""

from pdserve.planner.simulator.engine import Engine
from pdserve.planner.simulator.fleet import Mode, Role, Routing
from pdserve.planner.simulator.requests import Request


class Router:
    """Chooses, and keeps the credits."""

    def __init__(self, engines: list[Engine], mode: Mode, routing: Routing, headroom: int) -> None:
        self._engines = engines
        self._mode = mode
        self._routing = routing
        self._headroom = headroom
        self._reserved = [0] * len(engines)
        self._legs = [0] * len(engines)
        self._last_used = [0] * len(engines)
        self._uses = 0
        self._turn = dict.fromkeys(Role, 0)

    def choose(self, request: Request) -> tuple[int | None, int] | None:
        """(prefill, decode), or (None, an engine that does both); None: it has to wait."""
        prompt = request.need
        answers = prompt + min(request.left, self._headroom)
        if self._mode is not Mode.COLOCATED:
            prefill, decode = self._pick(Role.PREFILL, prompt), self._pick(Role.DECODE, answers)
            if prefill is not None and decode is not None:
                return self._taken(request, prefill, prompt, decode, answers)
        alone = self._pick(Role.BOTH, answers)
        # As the proxy does after a failure: with no prefill engine left, decode computes the prompt.
        if alone is None and request.attempt and not self._any(Role.PREFILL):
            alone = self._pick(Role.DECODE, answers)
        return None if alone is None else self._taken(request, None, 0, alone, answers)

    def give_back(self, request: Request, engine: int | None = None) -> None:
        """A leg has ended, or, without an engine, all of a request's."""
        kept = []
        for index, tokens in request.reserved:
            if engine is not None and index != engine:
                kept.append((index, tokens))
                continue
            self._reserved[index] -= tokens
            self._legs[index] -= 1
        request.reserved = kept

    def _taken(
        self, request: Request, prefill: int | None, prompt: int, decode: int, answers: int
    ) -> tuple[int | None, int]:
        legs = [(decode, answers)] if prefill is None else [(prefill, prompt), (decode, answers)]
        for index, tokens in legs:
            capped = min(tokens, self._engines[index].spec.kv_tokens)
            self._uses += 1
            self._reserved[index] += capped
            self._legs[index] += 1
            self._last_used[index] = self._uses
            request.reserved.append((index, capped))
            if self._routing is Routing.ROUND_ROBIN:
                self._turn[self._engines[index].role] += 1
        return prefill, decode

    def _any(self, role: Role) -> bool:
        return any(engine.alive and engine.role is role for engine in self._engines)

    def _pick(self, role: Role, tokens: int) -> int | None:
        able = [i for i, engine in enumerate(self._engines) if engine.alive and engine.role is role]
        if not able:
            return None
        if self._routing is Routing.ROUND_ROBIN:
            return able[self._turn[role] % len(able)]
        best: tuple[tuple[float, int, int], int] | None = None
        for i in able:
            total = self._engines[i].spec.kv_tokens
            available = max(0, total - self._reserved[i])
            if min(tokens, total) > available:
                continue
            load = (1.0 - available / total, self._legs[i], self._last_used[i])
            if best is None or load < best[0]:
                best = load, i
        return best[1] if best else None
