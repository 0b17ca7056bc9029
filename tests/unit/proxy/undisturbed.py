"""The process that draws a proxy's traces, with everybody's share of the machine: the one of these tests is full, and
what it has left over, which is all that the process takes, is next to nothing."""

from pdserve.proxy.tracing import apart
from pdserve.runtime.log import LogFormat, LogLevel

_CODE = (
    "import sys\n"
    "from pdserve.proxy.tracing import child\n"
    "child.stand_back = lambda *, urgent: None\n"
    "sys.exit(child.main())\n"
)


def command(delay: float, form: LogFormat, level: LogLevel, *, urgent: bool = False) -> list[str]:
    """As apart.command."""
    python, safe, _, _, *flags = apart.command(delay, form, level, urgent=urgent)
    return [python, safe, "-c", _CODE, *flags]
