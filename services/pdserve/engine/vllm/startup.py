"""What an engine's processes tell the service that starts them: facts, or the error they died of.

vLLM says of a failed start only that it failed. Each process writes one file into a folder that
the service made; the service reads them once the engine is up, or is not.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pdserve.rpc.errors import PdserveError, from_reason


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank knows once its KV memory is there."""

    rank: int
    num_blocks: int
    block_size: int
    identity: dict[str, str]
    """The engine's whole identity."""
    layout: str = ""
    """How the engine's KV lies, in words."""


class StartReport:
    """Writes to and reads from the folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def facts(self, facts: RankFacts) -> None:
        """A rank is up."""
        self._write(f"rank-{facts.rank}.json", asdict(facts))

    @contextmanager
    def errors(self, process: str) -> Iterator[None]:
        """Reports what leaves the block, and lets it go on."""
        try:
            yield
        except Exception as error:
            reason = error.reason if isinstance(error, PdserveError) else PdserveError.reason
            message = str(error) if isinstance(error, PdserveError) else f"{type(error).__name__}: {error}"
            self._write(f"error-{process}.json", {"reason": reason, "message": message})
            raise

    def read(self) -> list[RankFacts]:
        """The ranks that are up, in order."""
        found = [RankFacts(**json.loads(file.read_text())) for file in self._folder.glob("rank-*.json")]
        return sorted(found, key=lambda facts: facts.rank)

    def error(self) -> PdserveError | None:
        """The first error reported, if any."""
        for file in sorted(self._folder.glob("error-*.json")):
            said = json.loads(file.read_text())
            return from_reason(said["reason"], said["message"])
        return None

    def _write(self, name: str, value: dict[str, object]) -> None:
        draft = self._folder / f".{name}"
        draft.write_text(json.dumps(value))
        draft.rename(self._folder / name)
