"""What the clients of these tests do instead of sleeping, and how long the tests wait."""

WAIT = 10.0
SEEN_S = 1.0
"""Of a call whose deadline is to pass at the server: by then a busy machine has brought it there."""


class Waits:
    """Instead of sleeping, notes for how long."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)

    async def sleep_async(self, seconds: float) -> None:
        self.seconds.append(seconds)
