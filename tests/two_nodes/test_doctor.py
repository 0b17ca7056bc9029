"""`pdserve kvd doctor` between two nodes: what carries the bytes, how fast, and that TCP is not taken for RDMA."""

import asyncio
import json
from typing import Any

import pytest

from tests.two_nodes.conftest import BACK, DEVICE, NIXL, PEER, A, B, Deployment, Deployments, Nodes, start
from tests.two_nodes.links import received

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

FROM = f"{BACK[A]}:{PEER}"
"""Prefill's node, as decode's daemon reaches it."""


async def doctor(nodes: Nodes, *words: str) -> tuple[int, str, str]:
    """The command in decode's node: its status, and what it wrote to stdout and stderr."""
    log = nodes.folder / "doctor.log"
    command = ("-m", "pdserve.cli", "kvd", "doctor", f"--state-dir={nodes.folder}/{B}", *words)
    process: Any = await start(B, command, log, piped=True)
    out, _ = await asyncio.wait_for(process.communicate(), 120.0)
    said = await asyncio.to_thread(log.read_text)
    await asyncio.to_thread(log.unlink)
    return int(process.returncode), out.decode(), said


async def test_nixl_over_tcp_is_shown_with_its_rate_and_is_not_rdma(deployments: Deployments) -> None:
    """The way from the other node goes over the device that was given; `--expect tcp` and `nixl` are met, `--expect
    rdma` is status 1 and says what is used instead. The daemons hold nothing afterwards, and requests are answered."""
    async with deployments.running(Deployment(NIXL)) as two:
        status, out, err = await doctor(two, f"--peer={FROM}", "--expect=tcp")
        print(out)
        assert (status, err) == (0, "")
        (between,) = [part for part in out.split("\n\n") if part.startswith(f"from {FROM} ")]
        assert f"host memory: nixl over tcp/{DEVICE}" in between
        (nixl,) = [line for line in between.splitlines() if line.startswith("nixl ")]
        assert nixl.split()[1] == "yes"
        assert nixl.count("GB/s") >= 4
        assert "not between nodes" in between

        status, out, err = await doctor(two, f"--peer={FROM}", "--expect=rdma", "--json")
        assert status == 1
        assert err.startswith(f"pdserve: from {FROM} nixl over tcp/{DEVICE} ")
        assert "is used, not rdma (CONFIG)" in err
        within, between = json.loads(out)["ways"]
        assert [(one["transport"], one["used"]) for one in within["candidates"]][:2] == [("shm", True), ("nixl", False)]
        rates = [speed["bytes"] / speed["seconds"] for one in between["candidates"] for speed in one["speeds"]]
        assert len(rates) == 4
        assert max(rates) > 50e6

        answers = await (await two.ask("read", seed=5))
        await two.right(answers)
        await two.idle()
        described = await two.describe(B)
        carried = [(one.transport, one.lanes.split(" ")[0], one.bytes > 0) for one in described.carried]
        assert carried == [("nixl", f"tcp/{DEVICE}", True)]


async def test_a_link_that_is_cut_in_the_middle_ends_the_measurement_in_time(deployments: Deployments) -> None:
    """It says that the way does not work, with status 1, and another one works once the link is up."""
    async with deployments.running(Deployment(NIXL)) as two:
        asking = asyncio.create_task(doctor(two, f"--peer={FROM}", "--timeout=20"))
        before = received()
        async with asyncio.timeout(30.0):
            while received() < before + (8 << 20):  # noqa: ASYNC110  # the kernel counts
                await asyncio.sleep(0.02)
        with two.cut():
            status, out, err = await asking
        assert status == 1
        assert f"from {FROM} " in err
        assert f"from {FROM}" in out
        for _ in range(10):
            status, out, err = await doctor(two, f"--peer={FROM}", "--expect=nixl")
            if not status:
                break
            await asyncio.sleep(1.0)
        assert not status, (out, err)
