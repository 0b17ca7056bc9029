"""A headless Chromium, driven by the DevTools protocol: finds it, starts it, and acts as a person would."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
MISSING = (
    "these tests need Chromium and none was found: install it (Debian: apt-get install chromium-headless-shell), "
    "or say where it is with PDSERVE_CHROMIUM=/path/to/chromium"
)
FLAGS = (
    "--headless",
    "--remote-debugging-port=0",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--force-color-profile=srgb",
)
KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "Home": ("Home", 36, ""),
    "End": ("End", 35, ""),
    "Space": ("Space", 32, " "),
    "/": ("Slash", 191, "/"),
}


class NoBrowser(Exception):
    """There is none on this machine, or it did not start."""


def find() -> str:
    """Path of the browser.

    Raises:
        NoBrowser: there is none.
    """
    told = os.environ.get("PDSERVE_CHROMIUM", "")
    if told:
        if shutil.which(told) is None:
            raise NoBrowser(f"PDSERVE_CHROMIUM={told} is no program")
        return told
    for name in NAMES:
        path = shutil.which(name)
        if path:
            return path
    raise NoBrowser(MISSING)


@contextmanager
def started(folder: Path, timeout: float = 30.0) -> Iterator[str]:
    """Runs a browser with its profile in `folder`; gives the address of its DevTools socket.

    Raises:
        NoBrowser: there is none, or it does not listen within `timeout` seconds.
    """
    # Its sandbox refuses to run as root; the only pages it opens are ours.
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    program = find()
    process = subprocess.Popen(
        [program, *FLAGS, *sandbox, f"--user-data-dir={folder}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    said: list[str] = []
    listening = threading.Event()

    def read(lines: Any) -> None:
        for line in lines:
            said.append(line.rstrip())
            if "DevTools listening on" in line:
                listening.set()
        listening.set()  # it has ended

    reader = threading.Thread(target=read, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        listening.wait(timeout)
        address = next((line.split()[-1] for line in said if "DevTools listening on" in line), "")
        if not address:
            raise NoBrowser(f"{program} did not listen within {timeout} s: {' | '.join(said[-5:])}")
        yield address
    finally:
        # All of its processes: one that stays would hold the pipe that the reader waits on.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        reader.join(10)
        process.stderr.close()


class Page:
    """One tab. `complaints` has what the page's console, the browser and its policy had to say against it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, deadline: float) -> None:
        self._socket = socket
        self._deadline = deadline
        self._session = ""
        self._target = ""
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []

    async def open(self) -> None:
        """Makes the tab; `listen` must be running."""
        self._target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    async def aclose(self) -> None:
        """Closes the tab."""
        self._session = ""
        await self.call("Target.closeTarget", targetId=self._target)

    async def listen(self) -> None:
        """Takes in what the browser says, until its socket closes."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                waiting = self._answers.pop(said["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                details = said["params"]["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] in ("error", "warning"):
                entry = said["params"]["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            elif said["method"] == "Runtime.consoleAPICalled" and said["params"]["type"] in ("error", "warning"):
                self.complaints.append(str([arg.get("value") for arg in said["params"]["args"]]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command."""
        number = next(self._ids)
        waiting = asyncio.get_running_loop().create_future()
        self._answers[number] = waiting
        order = {"id": number, "method": method, "params": params}
        if self._session:
            order["sessionId"] = self._session
        await self._socket.send_json(order)
        said = await asyncio.wait_for(waiting, self._deadline)
        assert "error" not in said, f"{method}: {said.get('error')}"
        result: dict[str, Any] = said["result"]
        return result

    async def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """The window's size, and which colours the person prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def goto(self, url: str) -> None:
        """Opens an address; what it shows may still be on its way."""
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        said = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, f"{script}: {said.get('exceptionDetails')}"
        return said["result"].get("value")

    async def until(self, script: str) -> Any:
        """Waits until an expression is true, and gives its value; an element counts as true."""
        script = f"(() => {{ const found = {script}; return found instanceof Node ? true : found; }})()"
        try:
            async with asyncio.timeout(self._deadline):
                while True:
                    value = await self.run(script)
                    if value:
                        return value
                    await asyncio.sleep(0.02)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"not so within {self._deadline} s: {script}; the page says: {text[:1500]}") from None

    async def text(self, selector: str) -> str:
        """What a person reads in an element; waits for the element."""
        return str(await self.until(f"document.querySelector({json.dumps(selector)})?.innerText"))

    async def key(self, name: str) -> None:
        """Presses and lets go of one key."""
        code, number, text = KEYS[name]
        press = {"key": " " if name == "Space" else name, "code": code, "windowsVirtualKeyCode": number}
        await self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **press)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **press)

    async def move(self, x: float, y: float) -> None:
        """Moves the pointer."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def click(self, selector: str) -> None:
        """Clicks into the middle of an element."""
        box = await self.until(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1, buttons=1
            )

    async def choose(self, label: str, value: str) -> None:
        """Picks an option of the `<select>` with this label."""
        await self.run(
            f"(() => {{ const s = [...document.querySelectorAll('label.choice')].find((l) =>"
            f" l.firstChild.textContent === {json.dumps(label)}).querySelector('select');"
            f" s.value = {json.dumps(value)}; s.dispatchEvent(new Event('change')); }})()"
        )

    async def picture(self) -> bytes:
        """A PNG of the window."""
        taken = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(taken["data"])
