"""`pdserve-prefill` with ranks that sleep while they wait for each other: `python gentle.py FLAGS`.

vLLM's call sched_yield in a loop meanwhile, and for a second after each step. What shares their cores, as the kvd of a
whole node does here, then stands still for seconds (seen on Linux 6.18), which other nodes take for death.
"""

import sys
import time

from vllm.distributed.device_communicators import shm_broadcast

from pdserve.prefill.__main__ import main

shm_broadcast.sched_yield = lambda: time.sleep(0.0005)

if __name__ == "__main__":
    sys.exit(main())
