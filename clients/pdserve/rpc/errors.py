"""Every error that crosses a service boundary, once.

    PdserveError                      INTERNAL             INTERNAL
    ├── InvalidRequest                INVALID_ARGUMENT     INVALID_REQUEST
    │   ├── EmptyPrompt               INVALID_ARGUMENT     EMPTY_PROMPT
    │   ├── ContextExceeded           INVALID_ARGUMENT     CONTEXT_LENGTH_EXCEEDED
    │   ├── PoolExceeded              INVALID_ARGUMENT     PROMPT_EXCEEDS_POOL
    │   ├── UnknownField              INVALID_ARGUMENT     UNKNOWN_FIELD
    │   ├── UnsupportedParameter      INVALID_ARGUMENT     UNSUPPORTED_PARAMETER
    │   └── UnknownModel              NOT_FOUND            UNKNOWN_MODEL
    ├── Unauthenticated               UNAUTHENTICATED      UNAUTHENTICATED
    ├── TicketRefused                 FAILED_PRECONDITION  TICKET_REFUSED
    │   ├── TicketForged              PERMISSION_DENIED    TICKET_FORGED
    │   ├── TicketExpired             FAILED_PRECONDITION  TICKET_EXPIRED
    │   └── StaleEpoch                FAILED_PRECONDITION  STALE_EPOCH
    ├── TransferUsed                  ALREADY_EXISTS       TRANSFER_USED
    ├── IncompatibleEngines           FAILED_PRECONDITION  INCOMPATIBLE_ENGINES
    ├── TransferFailed                ABORTED              TRANSFER_FAILED
    │   ├── ProducerFailed            ABORTED              PRODUCER_FAILED
    │   ├── ConsumerFailed            ABORTED              CONSUMER_FAILED
    │   ├── PeerLost                  ABORTED              PEER_LOST
    │   ├── TieBroken                 ABORTED              TIE_BROKEN
    │   └── TransferExpired           ABORTED              TRANSFER_EXPIRED
    ├── Unavailable                   UNAVAILABLE          UNAVAILABLE
    │   ├── NoEngines                 UNAVAILABLE          NO_ENGINES
    │   ├── Draining                  UNAVAILABLE          DRAINING
    │   ├── KvdUnavailable            UNAVAILABLE          KVD_UNAVAILABLE
    │   └── EngineDied                UNAVAILABLE          ENGINE_DIED
    ├── Overloaded                    RESOURCE_EXHAUSTED   OVERLOADED
    ├── RequestCancelled              CANCELLED            CANCELLED
    ├── DeadlinePassed                DEADLINE_EXCEEDED    DEADLINE_EXCEEDED
    └── ConfigError                   FAILED_PRECONDITION  CONFIG

`reason` travels as google.rpc.ErrorInfo and comes back as the same class: `from_reason`. The gRPC
code is kept as its name, so that this file needs no grpc.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar


class PdserveError(Exception):
    """The root. A bare one means a defect in pdserve itself.

    `message` is for people; `metadata` says the same by name, for programs.
    """

    code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    """Whether the same request may succeed elsewhere or later."""

    def __init__(self, message: str, **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = metadata


class InvalidRequest(PdserveError):
    """The request can never succeed as it is."""

    code, reason = "INVALID_ARGUMENT", "INVALID_REQUEST"


class EmptyPrompt(InvalidRequest):
    """The prompt has no token."""

    reason = "EMPTY_PROMPT"


class ContextExceeded(InvalidRequest):
    """Prompt and answer do not fit the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class PoolExceeded(InvalidRequest):
    """The prompt needs more KV blocks than an engine has in all."""

    reason = "PROMPT_EXCEEDS_POOL"


class UnknownField(InvalidRequest):
    """A field that the API does not have."""

    reason = "UNKNOWN_FIELD"


class UnsupportedParameter(InvalidRequest):
    """A parameter that OpenAI or vLLM has and pdserve does not yet."""

    reason = "UNSUPPORTED_PARAMETER"


class UnknownModel(InvalidRequest):
    """No engine serves the model asked for."""

    code, reason = "NOT_FOUND", "UNKNOWN_MODEL"


class Unauthenticated(PdserveError):
    """The caller did not prove that it belongs to the cluster."""

    code, reason = "UNAUTHENTICATED", "UNAUTHENTICATED"


class TicketRefused(PdserveError):
    """A ticket or locator that cannot be honoured."""

    code, reason = "FAILED_PRECONDITION", "TICKET_REFUSED"


class TicketForged(TicketRefused):
    """Its signature is not the cluster's."""

    code, reason = "PERMISSION_DENIED", "TICKET_FORGED"


class TicketExpired(TicketRefused):
    """Its time is over."""

    reason, retryable = "TICKET_EXPIRED", True


class StaleEpoch(TicketRefused):
    """It speaks of an engine that has ended or was restarted."""

    reason, retryable = "STALE_EPOCH", True


class TransferUsed(PdserveError):
    """The transfer id has been used, or is in use by another request."""

    code, reason = "ALREADY_EXISTS", "TRANSFER_USED"


class IncompatibleEngines(PdserveError):
    """Two engines that may not exchange KV; `metadata` names what differs."""

    code, reason = "FAILED_PRECONDITION", "INCOMPATIBLE_ENGINES"


class TransferFailed(PdserveError):
    """The hand-over did not happen."""

    code, reason, retryable = "ABORTED", "TRANSFER_FAILED", True


class ProducerFailed(TransferFailed):
    """Prefill gave the request up."""

    reason = "PRODUCER_FAILED"


class ConsumerFailed(TransferFailed):
    """Decode gave the request up."""

    reason = "CONSUMER_FAILED"


class PeerLost(TransferFailed):
    """The other engine, or its daemon, is gone."""

    reason = "PEER_LOST"


class TieBroken(TransferFailed):
    """Two full pools waited for each other and this transfer was the youngest."""

    reason = "TIE_BROKEN"


class TransferExpired(TransferFailed):
    """A lease or a deadline ran out."""

    reason = "TRANSFER_EXPIRED"


class Unavailable(PdserveError):
    """Nobody can take the request now."""

    code, reason, retryable = "UNAVAILABLE", "UNAVAILABLE", True


class NoEngines(Unavailable):
    """No engine, or no pair, for the model and policy asked for."""

    reason = "NO_ENGINES"


class Draining(Unavailable):
    """The service finishes what it has and takes nothing new."""

    reason = "DRAINING"


class KvdUnavailable(Unavailable):
    """The daemon of the node cannot be reached."""

    reason = "KVD_UNAVAILABLE"


class EngineDied(Unavailable):
    """The engine behind the service has ended."""

    reason = "ENGINE_DIED"


class Overloaded(PdserveError):
    """No room within the admission deadline, or the queue is full."""

    code, reason, retryable = "RESOURCE_EXHAUSTED", "OVERLOADED", True


class RequestCancelled(PdserveError):
    """The caller went away or asked to stop."""

    code, reason = "CANCELLED", "CANCELLED"


class DeadlinePassed(PdserveError):
    """The request's deadline ran out."""

    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class ConfigError(PdserveError):
    """A process was started with settings that cannot work; it ends before it serves."""

    code, reason = "FAILED_PRECONDITION", "CONFIG"


def _tree(root: type[PdserveError]) -> Iterator[type[PdserveError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


BY_REASON: Mapping[str, type[PdserveError]] = {kind.reason: kind for kind in _tree(PdserveError)}
"""Every class by its reason."""


def from_reason(reason: str, message: str, metadata: Mapping[str, str] | None = None) -> PdserveError:
    """The error that a peer meant; a reason of a newer peer comes back as the root."""
    kind = BY_REASON.get(reason, PdserveError)
    extra = dict(metadata or {})
    if kind is PdserveError and reason != PdserveError.reason:
        extra["reason"] = reason
    error = kind(message)
    error.metadata = extra
    return error
