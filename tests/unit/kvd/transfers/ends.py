"""What a transfer's tests look at: how its ends ended, and that every block is free again."""

from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.testing import CoreDriver

T = b"transfer-0000001"
U = b"transfer-0000002"


def how(driver: CoreDriver, engine: str, handle: str) -> tuple[Outcome, str]:
    """A handle's outcome and reason."""
    end = driver.ends[engine, handle]
    return end.outcome, end.reason


def all_free(driver: CoreDriver, *engines: str) -> bool:
    """Whether no block of these engines is held."""
    return all(driver.leases.counts(e, 16).free == 16 for e in engines) and not len(driver.leases)
