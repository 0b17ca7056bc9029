"""One answer's stream of events, put together; pure, shared by both clients."""

from dataclasses import dataclass, field

from pdserve.api.serving.v1 import serving_pb2
from pdserve.client import _codec
from pdserve.client import _types as t
from pdserve.rpc import errors


@dataclass(slots=True)
class _Answer:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[t.PositionLogprobs] = field(default_factory=list)
    last: t.Delta | None = None


class Assembly:
    """Takes a stream's events in order; gives back its deltas and, at the end, the whole."""

    def __init__(self) -> None:
        self.started: serving_pb2.Started | None = None
        self.completion: t.Completion | None = None
        """Set by the event `finished`."""
        self.any_delta = False
        """Whether a delta has been given out: from then on the request may not be sent again."""
        self._answers: dict[int, _Answer] = {}

    def feed(self, event: serving_pb2.GenerateResponse) -> t.Delta | None:
        """Takes one event; the delta, if it was one.

        Raises:
            PdserveError: an event out of order: a defect of the peer.
        """
        match event.WhichOneof("event"):
            case "started" if self.started is None:
                self.started = event.started
            case "delta" if self.started is not None and self.completion is None:
                delta = _codec.delta(event.delta)
                self.any_delta = True
                self._add(delta)
                return delta
            case "finished" if self.started is not None and self.completion is None:
                self.completion = _codec.completion(self.started, self._choices(), event.finished)
            case None:
                pass  # an event of a newer proxy
            case name:
                raise errors.PdserveError(f"the proxy sent {name!r} out of order")
        return None

    def end(self) -> t.Completion:
        """The whole, when the stream has ended without an error.

        Raises:
            PdserveError: it ended before `finished`: a defect of the peer.
        """
        if self.completion is None:
            raise errors.PdserveError("the stream ended before the answer was finished")
        return self.completion

    def _add(self, delta: t.Delta) -> None:
        answer = self._answers.setdefault(delta.index, _Answer())
        answer.text.append(delta.text)
        answer.token_ids.extend(delta.token_ids)
        answer.logprobs.extend(delta.logprobs)
        answer.last = delta

    def _choices(self) -> tuple[t.Choice, ...]:
        choices = []
        for index, answer in sorted(self._answers.items()):
            reason = answer.last.finish_reason if answer.last else None
            if answer.last is None or reason is None:
                raise errors.PdserveError(f"the proxy finished before answer {index} did")
            choices.append(
                t.Choice(
                    index=index,
                    text="".join(answer.text),
                    token_ids=tuple(answer.token_ids),
                    finish_reason=reason,
                    stop_reason=answer.last.stop_reason,
                    logprobs=tuple(answer.logprobs),
                )
            )
        if not choices:
            raise errors.PdserveError("the proxy finished without an answer")
        return tuple(choices)
