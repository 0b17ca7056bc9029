"""An engine's way to its kvd: attachments (threaded and asyncio), the memory socket, notices."""

from pdserve.kvd.client.aio import AsyncAttachment
from pdserve.kvd.client.attachment import Attachment
from pdserve.kvd.client.config import AttachConfig
from pdserve.kvd.client.messages import (
    Accept,
    Begin,
    Cancel,
    End,
    Facts,
    Fenced,
    Hello,
    Offer,
    Outcome,
    Participant,
    Renew,
    Request,
    Retract,
    Welcome,
)
from pdserve.kvd.client.notices import NoticeSender
from pdserve.kvd.client.rank import Memory, Rank, RegionClient

__all__ = [
    "Accept",
    "AsyncAttachment",
    "AttachConfig",
    "Attachment",
    "Begin",
    "Cancel",
    "End",
    "Facts",
    "Fenced",
    "Hello",
    "Memory",
    "NoticeSender",
    "Offer",
    "Outcome",
    "Participant",
    "Rank",
    "RegionClient",
    "Renew",
    "Request",
    "Retract",
    "Welcome",
]
