"""Cores that processes used: real ones, from /proc."""

import os
import subprocess
import sys

import pytest

from pdserve.bench.compare.cpu import OTHERS, Reading, cores, parse, read

_CHILD = """
import sys, time
while time.process_time() < 0.3: pass
print("burnt", flush=True)
sys.stdin.readline()
"""
_BURN = """
import subprocess, sys, threading, time
def burn():
    end = time.thread_time() + 0.3
    while time.thread_time() < end: pass
burn()
other = threading.Thread(target=burn)
other.start()
other.join()
child = [sys.executable, "-S", "-c", sys.argv[1]]
living = subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
living.stdout.readline()
subprocess.run(child, check=True, input=b"end", stdout=subprocess.DEVNULL)
print("burnt", flush=True)
sys.stdin.readline()
living.communicate(b"end")
"""


def test_a_process_has_its_threads_and_children_living_and_dead() -> None:
    """Four times 0.3 s of work: main thread, another thread, a child that lives, one that has ended."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _BURN, _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "burnt\n"
            used = read({"burner": process.pid}).seconds["burner"]
        finally:
            process.stdin.close()
    # Not below what was burnt, but for the kernel's ticks; what it took to start the three is on top.
    assert used > 1.2 - 0.08


def test_a_child_with_a_name_of_its_own_is_not_its_parents() -> None:
    """`up` is the parent of all services, and this process that of `up`: nobody's time is counted twice."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()
            before = read({"client": os.getpid()}).seconds["client"]
            both = read({"client": os.getpid(), "child": process.pid}).seconds
        finally:
            process.stdin.close()
    assert both["child"] > 0.25
    assert both["client"] < before - 0.25 + 0.08


def test_a_process_that_is_gone_is_not_there() -> None:
    """No share is made up for it."""
    process = subprocess.Popen(["true"])
    process.wait()
    assert read({"gone": process.pid}).seconds == {}


def test_cores_are_seconds_over_wall_and_the_rest_is_others() -> None:
    """By hand: 2 s of wall, 1 and 0.5 s of CPU, 2.5 s of a busy machine."""
    before = Reading(10.0, {"proxy": 1.0, "kvd": 2.0, "died": 3.0}, 100.0)
    after = Reading(12.0, {"proxy": 2.0, "kvd": 2.5, "new": 9.0}, 102.5)
    assert cores(before, after) == pytest.approx({"proxy": 0.5, "kvd": 0.25, OTHERS: 0.5})
    with pytest.raises(ValueError, match="one moment"):
        cores(before, before)


def test_a_name_with_brackets_and_spaces_is_read_over() -> None:
    """proc(5): the second field is the name, in brackets, and may have both."""
    rest = "S 7 1 1 0 -1 0 0 0 0 0 " + "100 50 25 5 " + "20 0 1 0 0"
    stat = parse(f"42 (a (b) c) d) {rest}")
    assert (stat.pid, stat.parent) == (42, 7)
    assert stat.seconds == pytest.approx(180 / os.sysconf("SC_CLK_TCK"))
