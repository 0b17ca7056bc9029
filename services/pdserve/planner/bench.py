"""How fast the simulator is: requests per second of one core, 2000 in, 1000 out, 8 per second, 1P1D.

    python -m pdserve.planner.bench [--requests 4000] [--profile mi300x]

Prints it for jumps and for single steps, latencies and their percentiles included.
"""

import argparse
import time

from pdserve.bench.workload.arrivals import like_vllm
from pdserve.planner.profile_file import load
from pdserve.planner.simulator import Job, Mode, simulate


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="pdserve.planner.bench")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--profile", default="mi300x")
    arguments = parser.parse_args()
    fleet = load(arguments.profile).fleet(Mode.WRITE, prefills=1, decodes=1)
    jobs = [Job(2000, 1000)] * arguments.requests
    arrivals = like_vllm(8.0, 1.0, arguments.requests, 0)
    for name, jump in (("jumping", True), ("step by step", False)):
        begun = time.process_time()
        outcome = simulate(fleet, jobs, arrivals, jump=jump)
        served = len(outcome.served)
        seconds = time.process_time() - begun
        steps = sum(engine.steps for engine in outcome.engines)
        print(f"{name:13} {served / seconds:8.0f} requests/s  {seconds:6.2f} s of CPU  {steps} engine steps")


if __name__ == "__main__":
    main()
