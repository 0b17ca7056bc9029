"""`pdserve up --restarts 1` with the sim engine outlives kill -9 of each of its services once, and no more.

One deployment for all tests of this file, with an engine beside the pair to compare with. The tests are one story:
each service dies once, then one of them again.
"""

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pdserve.client import Client, Mode
from tests.e2e import whole

if TYPE_CHECKING:
    from tests.e2e.conftest import Up

SEED = int(os.environ.get("PDSERVE_TEST_SEED", "1"))
BACK_S = 40.0
"""Longest wait for a service to be back, on a machine that does other things too."""
MODES: tuple[Mode, ...] = ("read", "write")
SERVICES = ("kvd", "prefill-0", "decode-0", "proxy")


@dataclass(frozen=True)
class Served:
    """A deployment, and a client that is kept through everything."""

    up: "Up"
    client: Client

    def ask(self, prompt: str) -> None:
        """The pair gives in both modes what one engine alone gives, and everything is handed over."""
        for mode in MODES:
            text = f"{mode} {prompt}"
            both = self.client.generate(text, max_tokens=16, temperature=0, mode=mode, on_failure="fail")
            alone = self.client.generate(text, max_tokens=16, temperature=0, route="colocated")
            assert both.token_ids == alone.token_ids
            assert (both.mode, both.fallbacks, both.recomputed_tokens) == (mode, 0, 0)
            assert both.kv_bytes > 0


@pytest.fixture(scope="module")
def served(launch: "Callable[..., Up]") -> Iterator[Served]:
    """Ended by the last test of the file."""
    up = launch("--engine", "sim", "--prefill", "1", "--decode", "1", "--both", "1", "--restarts", "1")
    with Client(up.ready().grpc, timeout=30.0) as client:
        yield Served(up, client)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_is_killed_comes_back(served: Served, name: str) -> None:
    """Another process at the same place: a new engine with a new id, a new kvd with a new epoch, the same engines at a
    new proxy. Nobody else is restarted, no block is held, and the same client is answered right: what it asks in the
    moment of the death too, however long that takes."""
    print(f"PDSERVE_TEST_SEED={SEED}")
    prompt = "".join(random.Random(f"{SEED} {name}").choices("etaoin shrdlu", k=120))
    before = served.up.ready()
    ids, epoch = whole.engines(before), whole.kvd(before).kvd_epoch
    right = served.client.generate(f"at once {prompt}", max_tokens=16, temperature=0, route="colocated")
    os.kill(before.processes[name], signal.SIGKILL)
    asked = served.client.generate(f"at once {prompt}", max_tokens=16, temperature=0)
    assert asked.token_ids == right.token_ids
    after = whole.again(served.up, name, 1, BACK_S)
    assert {one for one in before.processes if before.processes[one] != after.processes[one]} == {name}
    assert (after.grpc, after.http, after.kvd) == (before.grpc, before.http, before.kvd)
    renewed = {role for role, engine_id in whole.engines(after).items() if engine_id != ids[role]}
    assert renewed == {name.removesuffix("-0")} - {"kvd", "proxy"}
    assert (whole.kvd(after).kvd_epoch != epoch) == (name == "kvd")
    served.ask(prompt)
    assert whole.again(served.up, name, 1, within=10.0).processes == after.processes
    told = served.up.command("status", "--json")
    assert told.returncode == 0, told.stderr
    shown = json.loads(told.stdout)["processes"][name]
    assert (shown["pid"], shown["restarts"]) == (after.processes[name], 1)


def test_the_second_death_of_the_same_is_the_end(served: Served) -> None:
    """It has had its restart: exit status 1, it is named with the end of its last life's log, and nothing is left."""
    at = served.up.ready()
    assert at.restarts["decode-0"] == 1, "it died before, in this file"
    os.kill(at.processes["decode-0"], signal.SIGKILL)
    assert served.up.process.wait(BACK_S) == 1
    out = served.up.out.read_text()
    said = re.search(
        r"pdserve: decode-0 \(pid \d+\) was ended by signal 9 after restart 1 of 1; the end of its log", out
    )
    assert said, out
    assert out[said.end() :].count('"serving"') == 1, "of one life"
    assert served.up.left(at) == []
