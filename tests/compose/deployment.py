"""One deployment of deploy/compose in a container engine, driven by the commands that its operators use."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
COMPOSE: Final = ROOT / "deploy" / "compose"
STANDIN: Final = ROOT / "tests" / "compose" / "standin.yaml"
PROJECT: Final = "pdserve-test"
SERVICES: Final = ("jaeger", "kvd", "prefill", "decode", "proxy")
STEPS: Final = "--sim-cost-decode-base 0.02 --sim-cost-prefill-base 0.02"
"""An answer of 64 tokens takes some 1.3 s, so that one is always under way."""


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
    env: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path) -> "Deployment":
        """With a key, a user and ports of its own; nothing runs yet."""
        http, grpc, traces = free_ports(3)
        made = cls(folder, http, grpc, traces)
        # A user who is not root has no right to give the key to another one.
        uid, gid = (10001, 10001) if os.geteuid() == 0 else (os.getuid(), os.getgid())
        key = folder / "cluster.key"
        key.write_text("a key of the tests, which is long enough\n")
        key.chmod(0o400)
        if os.geteuid() == 0:
            os.chown(key, uid, gid)
        made.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "COMPOSE_"))},
            "PDSERVE_PROJECT": PROJECT,
            "PDSERVE_IMAGE": "pdserve:test",
            "PDSERVE_BENCH_IMAGE": "pdserve-bench:test",
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
        return ("--env-file", os.devnull, "-f", str(COMPOSE / "compose.yaml"), "-f", str(STANDIN))

    async def compose(self, *words: str, timeout: float = 120.0) -> str:
        """`docker compose ...`."""
        return await run(self.env["PDSERVE_COMPOSE"], *self.files, *words, env=self.env, timeout=timeout)

    async def docker(self, *words: str, timeout: float = 60.0) -> str:
        """`docker ...`."""
        return await run("docker", *words, env=self.env, timeout=timeout)

    async def inspect(self, service: str) -> list[dict[str, Any]]:
        """What the engine knows of each container of a service."""
        ids = (await self.compose("ps", "--all", "--quiet", service)).split()
        found: list[dict[str, Any]] = json.loads(await self.docker("inspect", *ids)) if ids else []
        return found

    async def kill(self, service: str) -> None:
        """SIGKILL to the service's own process, as the kernel does when memory is short. Not `docker kill`, which
        the engine takes for its operator's wish that it stays away."""
        (container,) = await self.inspect(service)
        os.kill(first_child(container["State"]["Pid"]), signal.SIGKILL)

    async def healthy_again(self, service: str, container: dict[str, Any], seconds: float = 60.0) -> None:
        """Returns when the container runs in a later life than `container` tells of, and is healthy.

        Raises:
            TimeoutError: it is not within `seconds`.
        """
        async with asyncio.timeout(seconds):
            while True:
                (now,) = await self.inspect(service)
                state = now["State"]
                later = state["StartedAt"] != container["State"]["StartedAt"] and state["Running"]
                if later and state["Health"]["Status"] == "healthy":
                    return
                await asyncio.sleep(0.25)

    async def down(self) -> None:
        """`down -v`."""
        await self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", timeout=180.0)

    async def left(self) -> Sequence[str]:
        """What the engine still has of the project: containers, volumes, networks."""
        label = f"label=com.docker.compose.project={PROJECT}"
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
    """Ports on loopback that are free now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
