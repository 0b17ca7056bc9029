"""`pdserve kvd doctor` on the GPUs of this machine, by a kvd as a process of its own."""

from pathlib import Path

import pytest

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.kvd.testing import kvd_process
from pdserve.rpc.channel import aio_channel

pytestmark = pytest.mark.timeout(180)


async def test_memory_of_each_gpu_is_measured(tmp_path: Path) -> None:
    """And between them, where there are several: by size of blocks; twice, since all of it is given back."""
    async with (
        kvd_process(tmp_path, "--transport", "gpu_ipc", within=60.0) as kvd,
        aio_channel(f"unix:{kvd.socket}") as to,
    ):
        for _ in range(2):
            said = await kvd_pb2_grpc.OperatorStub(to).Measure(
                kvd_pb2.MeasureRequest(deadline_seconds=60.0), timeout=70.0
            )
            ways = [way for way in said.ways if way.kind != "host"]
            gpus = {way.to_device for way in ways}
            assert len(ways) == (2 * len(gpus) if len(gpus) > 1 else 1)
            for way in ways:
                (used,) = [one for one in way.candidates if one.used]
                rates = [f"{one.bytes / one.seconds / 1e9:.0f}" for one in used.speeds]
                print(f"{way.from_device} to {way.to_device}: {used.latency_seconds * 1e3:.2f} ms, {rates} GB/s")
                assert (used.transport, used.error, way.not_measured, len(rates)) == ("gpu_ipc", "", "", 4)
