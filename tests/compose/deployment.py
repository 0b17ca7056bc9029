"""One deployment of deploy/compose in a container engine, driven by the commands that its operators use."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
COMPOSE: Final = ROOT / "deploy" / "compose"
NO_JAEGER: Final = COMPOSE / "no-jaeger.yaml"
"""Jaeger's image cannot be pulled on a closed network."""
SERVICES: Final = ("jaeger", "kvd", "prefill", "decode", "proxy")
STEPS: Final = "--sim-cost-decode-base 0.02 --sim-cost-prefill-base 0.02"
"""An answer of 64 tokens takes some 1.3 s, so that one is always under way."""
_PORTS: Final = range(20_000, 32_000, 1_000)
"""First port of each pytest process: below those that the kernel gives to connections that go out."""
_given: set[int] = set()


class CommandFailed(Exception):
    """A command ended with another status than 0; the message has what it said."""


async def run(*command: str, env: dict[str, str], timeout: float = 120.0) -> str:
    """A command's stdout.

    Raises:
        CommandFailed: its status is not 0.
        TimeoutError: it takes longer; it is killed.
    """
    process = await asyncio.create_subprocess_exec(
        *command, env=env, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        said = f"{out.decode(errors='replace')}\n{err.decode(errors='replace')}"[-6000:]
        raise CommandFailed(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
    return out.decode()


@dataclass(slots=True)
class Deployment:
    """The services of compose.yaml, with our trace store in Jaeger's place."""

    folder: Path
    """For the key."""
    http: int
    """Ports on loopback."""
    grpc: int
    traces: int
    project: str
    overrides: tuple[Path, ...]
    """Files behind compose.yaml."""
    env: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, project: str, overrides: tuple[Path, ...]) -> "Deployment":
        """With a key, a user and ports of its own; nothing runs yet."""
        http, grpc, traces = free_ports(3)
        made = cls(folder, http, grpc, traces, project, overrides)
        # A user who is not root has no right to give the key to another one.
        uid, gid = (10001, 10001) if os.geteuid() == 0 else (os.getuid(), os.getgid())
        key = folder / "cluster.key"
        key.write_text("a key of the tests, which is long enough\n")
        key.chmod(0o400)
        if os.geteuid() == 0:
            os.chown(key, uid, gid)
        made.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "COMPOSE_"))},
            "PDSERVE_PROJECT": project,
            "PDSERVE_IMAGE": "pdserve:test",
            "PDSERVE_BENCH_IMAGE": "pdserve-bench:test",
            "PDSERVE_NIXL_IMAGE": "pdserve-nixl:test",
            "PDSERVE_VLLM_IMAGE": "pdserve-vllm:test",
            "PDSERVE_CLUSTER_KEY": str(key),
            "PDSERVE_UID": str(uid),
            "PDSERVE_GID": str(gid),
            "PDSERVE_HTTP_PORT": str(made.http),
            "PDSERVE_GRPC_PORT": str(made.grpc),
            "PDSERVE_TRACES_PORT": str(made.traces),
            "PDSERVE_HEALTH_INTERVAL": "1s",
            "PDSERVE_ENGINE_ARGS": STEPS,
            "PDSERVE_BUILD_NETWORK": "none",  # offline is shown by there being no network
        }
        return made

    @property
    def files(self) -> tuple[str, ...]:
        """The compose files, as options. An .env that lies beside them is the developer's own."""
        behind = [word for path in self.overrides for word in ("-f", str(path))]
        return ("--env-file", os.devnull, "-f", str(COMPOSE / "compose.yaml"), *behind)

    async def compose(self, *words: str, timeout: float = 120.0) -> str:
        """`docker compose ...`."""
        return await run(self.env["PDSERVE_COMPOSE"], *self.files, *words, env=self.env, timeout=timeout)

    async def docker(self, *words: str, timeout: float = 60.0) -> str:
        """`docker ...`."""
        return await run("docker", *words, env=self.env, timeout=timeout)

    async def containers(self) -> dict[str, list[dict[str, Any]]]:
        """What the engine knows of each container, by service."""
        # Not by `compose ps`: each look would read all files, and the tests look often.
        label = f"label=com.docker.compose.project={self.project}"
        ids = (await self.docker("ps", "--all", "--quiet", "--filter", label)).split()
        found: dict[str, list[dict[str, Any]]] = {}
        for container in json.loads(await self.docker("inspect", *ids)) if ids else []:
            found.setdefault(container["Config"]["Labels"]["com.docker.compose.service"], []).append(container)
        return found

    async def only(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's one container."""
        (container,) = (await self.containers())[service]
        return container

    async def healthy(self, *services: str) -> None:
        """Asserts that the one container of each service is healthy now."""
        found = await self.containers()
        states = {service: [one["State"]["Health"]["Status"] for one in found[service]] for service in services}
        assert states == {service: ["healthy"] for service in services}

    async def healthy_in(self, container: dict[str, Any], seconds: float, started: str = "") -> None:
        """Returns when a container is healthy, in another life than the one that began at `started`.

        Raises:
            TimeoutError: it is not within `seconds`.
        """
        async with asyncio.timeout(seconds):
            while True:
                (now,) = json.loads(await self.docker("inspect", container["Id"]))
                state = now["State"]
                if state["StartedAt"] != started and state["Running"] and state["Health"]["Status"] == "healthy":
                    return
                await asyncio.sleep(0.2)

    async def killed(self, service: str) -> None:
        """SIGKILL to the service's own process, as the kernel does when memory is short; returns when it is healthy in
        its next life, and the proxy too. Not `docker kill`, which the engine takes for its operator's wish that it
        stays away.

        Raises:
            TimeoutError: it does not come back.
        """
        found = await self.containers()
        (container,), (proxy,) = found[service], found["proxy"]
        os.kill(first_child(container["State"]["Pid"]), signal.SIGKILL)
        await self.healthy_in(container, 60.0, started=container["State"]["StartedAt"])
        await self.healthy_in(proxy, 30.0)

    async def down(self) -> None:
        """`down -v`."""
        await self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", timeout=180.0)

    async def left(self) -> Sequence[str]:
        """What the engine still has of the project: containers, volumes, networks."""
        label = f"label=com.docker.compose.project={self.project}"
        found: list[str] = []
        for words in (("ps", "--all"), ("volume", "ls"), ("network", "ls")):
            found += (await self.docker(*words, "--quiet", "--filter", label)).split()
        return found


def first_child(pid: int) -> int:
    """The process that a container's init looks after, by its number on this host."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def is_mounted(name: str) -> bool:
    """Whether something of that name is still mounted on this host."""
    return name in Path("/proc/self/mounts").read_text()


def free_ports(count: int) -> Sequence[int]:
    """Ports on loopback that are free now, all different, also from those that other pytest processes are given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _PORTS[worker % len(_PORTS)]
    found: list[int] = []
    for port in range(first, first + _PORTS.step):
        if port not in _given and len(found) < count:
            with socket.socket() as one, contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
    assert len(found) == count, f"no {count} ports are free from {first} on"
    _given.update(found)
    return found


@contextlib.contextmanager
def deployed(compose: Path, project: str, overrides: tuple[Path, ...] = (NO_JAEGER,)) -> Iterator[Deployment]:
    """A deployment with a key of its own, of which nothing runs yet; what runs at the end is taken down."""
    with tempfile.TemporaryDirectory(prefix="pdserve-key-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        made = Deployment.make(folder, project, overrides)
        made.env["PDSERVE_COMPOSE"] = str(compose)
        asyncio.run(made.down())
        try:
            yield made
        finally:
            asyncio.run(made.down())
