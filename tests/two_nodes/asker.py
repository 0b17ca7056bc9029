"""A client in the first namespace, seen from the tests: one process (`ask.py`) that makes all calls of a deployment."""

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
LINE_BYTES = 1 << 24
_ANSWER_S = 120.0


class Asker:
    """See the module. `process`: of ask.py, which writes to `log`, with its stdin and stdout."""

    def __init__(self, process: Any, log: Path) -> None:
        self._process = process
        self._log = log
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[list[Answer]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def asks(self, calls: Sequence[Mapping[str, Any]]) -> "asyncio.Task[list[Answer]]":
        """Begins to make these calls; their answers come in this order. AssertionError: not in time, or it has died."""
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        if self._reading.done():
            self._fail()
        else:
            self._process.stdin.write(json.dumps([number, list(calls)]).encode() + b"\n")
            await self._process.stdin.drain()
        return asyncio.create_task(self._answered(number, len(calls)))

    async def aclose(self) -> None:
        """Ends the process."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _answered(self, number: int, count: int) -> list[Answer]:
        try:
            answers = await asyncio.wait_for(self._asked[number], _ANSWER_S)
        except TimeoutError:
            raise AssertionError(f"no answers within {_ANSWER_S:g} s") from None
        finally:
            del self._asked[number]
        assert len(answers) == count
        return answers

    async def _read(self) -> None:
        while line := await self._process.stdout.readline():
            number, answers = json.loads(line)
            if number in self._asked:
                self._asked[number].set_result(answers)
        self._fail()

    def _fail(self) -> None:
        for answers in self._asked.values():
            if not answers.done():
                answers.set_exception(AssertionError(f"ask.py has ended: {self._log.read_text()}"))
