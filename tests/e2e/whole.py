"""Whether a deployment with one pair is whole: asked of the proxy and of kvd, over fresh connections."""

import time
from typing import TYPE_CHECKING

import grpc

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.cli.deployment import Deployment
from pdserve.client import Client, PdserveError, Retry
from pdserve.rpc.channel import sync_channel

if TYPE_CHECKING:
    from tests.e2e.conftest import Up

_ANSWER_S = 10.0
_PARTICIPANTS = 3
"""Of an engine with one rank: host, scheduler, worker."""


def kvd(at: Deployment) -> kvd_pb2.DescribeResponse:
    """What kvd holds.

    Raises:
        grpc.RpcError: it does not answer.
    """
    with sync_channel(at.kvd) as channel:
        return kvd_pb2_grpc.OperatorStub(channel).Describe(kvd_pb2.DescribeRequest(), timeout=_ANSWER_S)


def engines(at: Deployment) -> dict[str, str]:
    """Ids of the engines that the proxy routes to, by role.

    Raises:
        PdserveError: it does not answer.
    """
    with Client(at.grpc, timeout=_ANSWER_S, retry=Retry(attempts=1)) as client:
        known = client.topology().engines
    return {one.role: one.engine_id for one in known if one.state == "ready" and not one.excluded_because}


def missing(at: Deployment) -> list[str]:
    """What is not as in a deployment that has just been started: services that do not answer, engines that are not
    there or not with kvd, blocks and transfers that are held, and defects."""
    try:
        routed, said = engines(at), kvd(at)
    except PdserveError as error:
        return [f"proxy: {error.message}"]
    except grpc.RpcError as error:
        return [f"kvd: {error}"]
    pair = {routed.get(role, "") for role in ("prefill", "decode")}
    found = [f"no {role} is routed to" for role in ("prefill", "decode") if role not in routed]
    attached = {e.engine_id for e in said.engines if sum(p.attached for p in e.participants) == _PARTICIPANTS}
    if not found and {e.engine_id for e in said.engines} != pair:
        found.append(f"kvd knows {[e.engine_id for e in said.engines]}, the proxy {pair}")
    found += [f"{engine_id} is not attached" for engine_id in pair - attached if engine_id]
    if {region.engine_id for region in said.regions} != pair:
        found.append(f"kvd has the memory of {[region.engine_id for region in said.regions]}")
    found += [
        f"{r.num_blocks - r.free} blocks of {r.engine_id} are held" for r in said.regions if r.free != r.num_blocks
    ]
    found += [f"{count} transfers {state}" for state, count in said.transfers.items() if not state.startswith("ended.")]
    return [*found, *([f"{said.defects} defects"] if said.defects else [])]


def again(up: "Up", name: str, restarts: int, within: float) -> Deployment:
    """Waits until a process was started again for that time and the deployment is whole; its record then."""
    deadline = time.monotonic() + within
    while True:
        at = up.ready()
        left = missing(at) if at.restarts[name] == restarts else [f"{name} was started again {at.restarts[name]} times"]
        if not left:
            return at
        assert up.process.poll() is None, up.out.read_text()
        assert time.monotonic() < deadline, (left, up.out.read_text())
        time.sleep(0.1)
