"""A nixl process as kvd sees it: `Child` has how it lives and dies, this what only nixl is asked.

A stalled peer cannot be told from a dead one, and nixl has no way to end a read for certain but its process's end.
"""

import os
from collections.abc import Mapping

import structlog

from pdserve.kvd.config import NixlConfig
from pdserve.kvd.transport.child import Child, Launch
from pdserve.kvd.transport.nixl_lanes import plain_words, read_lanes
from pdserve.kvd.transport.nixl_wire import Load

log = structlog.get_logger(__name__)


class NixlProcess(Child):
    """See the module. Made by `start`."""

    lanes = ""
    """What reads are carried by; empty before the first."""

    @classmethod
    async def start(cls, name: str, config: NixlConfig, *, serves: bool) -> "NixlProcess":
        """A process that is ready: one that `serves` what others read, or one that reads. Cancelled, it leaves nothing.

        Raises:
            TransferFailed: it did not get ready; with what it wrote.
        """
        return await cls.launch(
            Launch(
                library="nixl",
                module="pdserve.kvd.transport.nixl_worker",
                name=name,
                args=(str(config.poll) if serves else "-",),
                env=environment(config, os.environ),
                stall=config.stall,
            )
        )

    async def load(self, metadata: bytes) -> None:
        """Makes another agent's memory known to it.

        Raises:
            TransferFailed: it is no metadata, or there is no way to that agent.
        """
        await self.call(Load(metadata))

    def _carried(self, nbytes: int) -> str:
        if nbytes and not self.lanes:
            self.lanes = read_lanes(self._said())
            log.info("nixl_lanes", process=self.name, lanes=self.lanes)
        return self.lanes

    def _plain(self, words: str) -> str:
        return plain_words(words)


def environment(config: NixlConfig, around: Mapping[str, str]) -> dict[str, str]:
    """The process's environment: UCX's settings from the configuration before those around it."""
    made = dict(around)
    made |= {"UCX_LOG_FILE": "stderr", "UCX_PROTO_INFO": "y"}
    if config.tls:
        made["UCX_TLS"] = config.tls
    if config.net_devices:
        made["UCX_NET_DEVICES"] = config.net_devices
    return made
