"""Where the time of a gpu_ipc copy goes, and what would save some: `python -m tests.hw.gpu_variants`.

Copies of 1 GiB as `pdserve.kvd.bench --transport gpu_ipc` makes them, scattered over 32 layers of another process, on
one device, or (`--across`) from one to another: there the destination's device reads over, as kvd has it do, and in a
second round the source's writes over. Two tables for each length of runs:

- kernels: one launch of everything, its table on the device, by the device's own clock;
- ways to launch: a copy as kvd's device thread makes it, in batches, by the host's clock until the host knows; with how
  long the host took to the first launch.

Both are beside a plain copy, which is measured as the benchmark measures it. Repeats are interleaved, in random order;
figures are medians, and kvd's own way is there twice: what those two are apart is noise. Before it is measured, every
way must have copied the right bytes and no others, of runs over the borders of pieces too.
"""

import argparse
import collections
import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import torch
import triton

from pdserve.kvd.config import GpuCopy
from pdserve.kvd.plan import make_plan
from pdserve.kvd.runs import Repeated, Runs
from pdserve.kvd.testing.device_process import RemoteMemory
from pdserve.kvd.testing.engine import plain_layout
from pdserve.kvd.transport.device.gpu import GpuDevice, GpuDevices
from pdserve.kvd.transport.device.port import DeviceFailed
from tests.contract.kvd.gpu_suite import OTHERS, PIECES, SIZE, runs
from tests.hw.engines import Engines
from tests.hw.gpu_kernels import KERNELS, Kernel
from tests.hw.gpu_launches import Path, paths
from tests.hw.gpu_rig import MOVED, Bench, Plain, mapped, run

_LAYERS: Final = 32
_LAYER: Final = 256 << 20
_KIB: Final = (16, 64, 256)

T = TypeVar("T")


# -- right first ---------------------------------------------------------------------------------


def _plans(seed: int) -> Iterator[tuple[str, Runs]]:
    """Runs of one length each, since ways to launch are told no other."""
    random = np.random.default_rng(seed)
    for block in (16, 112, 4096, 16 << 10, 304 << 10):
        src, dst = (random.permutation(SIZE // block)[:2000].astype(np.uint64) * np.uint64(block) for _ in range(2))
        yield f"{block} bytes", Runs(src, dst, np.full(len(src), block, np.uint64))
        src_at, dst_at = (
            random.permutation(8).astype(np.uint64)[:5] * np.uint64(SIZE // 8 // 16 * 16) for _ in range(2)
        )
        few = src < SIZE // 9 // 16 * 16 - block, dst < SIZE // 9 // 16 * 16 - block
        count = min(int(some.sum()) for some in few)
        src, dst = src[few[0]][:count], dst[few[1]][:count]
        if count:
            yield (
                f"{block} bytes at five places",
                Repeated(Runs(src, dst, np.full(count, block, np.uint64)), src_at, dst_at),
            )
    yield "everything", runs((0, 0, SIZE))


def check(device: GpuDevice, engines: Engines, seed: int) -> set[str]:
    """Names of the ways that copy other bytes than asked for, or fail; each is printed with the reason."""
    memory = [engines.make(PIECES, 1), engines.make(OTHERS, 2)]
    bench = mapped(device, memory)
    ways: list[tuple[str, Callable[[Runs], object]]] = [
        (one.name, functools.partial(_by_kernel, bench, one)) for one in KERNELS if one.lookup
    ]
    ways += [(one.name, functools.partial(run, one, bench)) for one in paths(bench.device, bench.bare)]
    bad = set()
    for name, copy in ways:
        try:
            for what, plan in _plans(seed):
                _check_one(memory, what, plan, copy)
        except (AssertionError, RuntimeError, DeviceFailed, triton.TritonError) as error:
            print(f"NOT RIGHT: {name}: {error}", flush=True)
            bad.add(name)
        # No way finds another one's bytes.
        bench.device.launch(runs((0, 16, SIZE - 16)), bench.dst, bench.dst).wait()
    print(f"{len(ways) - len(bad)} of {len(ways)} ways copy the right bytes and no others (seed {seed})", flush=True)
    return bad


def _by_kernel(bench: Bench, kernel: Kernel, plan: Runs) -> None:
    with torch.cuda.stream(bench.torch_stream):
        kernel.launch(bench.work(plan))
    torch.cuda.synchronize()


def _check_one(memory: Sequence[RemoteMemory], what: str, plan: Runs, copy: Callable[[Runs], object]) -> None:
    source, before, around = memory[0].bytes(), memory[1].bytes(), memory[1].around()
    expected = before.copy()
    for at, to, count in zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True):
        expected[to : to + count] = source[at : at + count]
    if (before == expected).all():
        raise AssertionError(f"{what}: nothing to copy")
    copy(plan)
    if not (memory[1].bytes() == expected).all():
        raise AssertionError(f"{what}: other bytes")
    if not (memory[1].around() == around).all():
        raise AssertionError(f"{what}: bytes around the pieces")


# -- fast then -----------------------------------------------------------------------------------


def _plan(kib: int, random: np.random.Generator) -> Runs:
    layout = plain_layout(_LAYER // (kib << 10), layers=_LAYERS, block_bytes=kib << 10)
    count = MOVED // (kib << 10) // _LAYERS
    src, dst = (random.permutation(layout.num_blocks)[:count].tolist() for _ in range(2))
    return make_plan(layout, layout, range(_LAYERS), src, dst)


def _turns(ways: Sequence[T], repeats: int, random: np.random.Generator) -> Iterator[tuple[bool, Sequence[T]]]:
    """Whether a round counts, and its order: another one each time, since who comes first finds the processor cold."""
    for number in range(repeats + 2):
        yield number > 1, [ways[i] for i in random.permutation(len(ways))]


def kernels(bench: Bench, plain: Plain, ways: Sequence[Kernel], kib: int, repeats: int, seed: int) -> None:
    """Prints the first table."""
    random = np.random.default_rng(seed)
    work = bench.work(_plan(kib, random))
    took: dict[str, list[float]] = collections.defaultdict(list)
    for counts, order in _turns(ways, repeats, random):
        turn = {"plain": plain.device_seconds()}
        for one in order:
            turn[one.name] = plain.timed(bench.device._stream, functools.partial(one.launch, work))
        for name, seconds in turn.items():
            took[name] += [seconds] * counts
    fast = statistics.median(took["plain"])
    print(f"\n| one launch of 1 GiB, {kib} KiB runs | device | of plain, {fast * 1e3:.3f} ms |\n|---|---|---|")
    for one in ways:
        median = statistics.median(took[one.name])
        print(f"| {one.name} | {median * 1e3:.3f} ms | {fast / median:.3f} |", flush=True)


def launches(bench: Bench, plain: Plain, ways: Sequence[Path], kib: int, repeats: int, seed: int) -> None:
    """Prints the second table."""
    random = np.random.default_rng(seed)
    took: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for counts, order in _turns(ways, repeats, random):
        plan = _plan(kib, random)
        plain.seconds()  # a device that was idle is slow at first
        turn = {"plain": (plain.seconds(), 0.0)}
        for one in order:
            plain.seconds()
            turn[one.name] = run(one, bench, plan)
        for name, seconds in turn.items():
            took[name] += [seconds] * counts
    fast = statistics.median(whole for whole, _ in took["plain"])
    print(
        f"\n| copy of 1 GiB, {kib} KiB runs | until the host knows | of plain, {fast * 1e3:.3f} ms "
        "| to the first launch |\n|---|---|---|---|"
    )
    for one in ways:
        whole, first = (statistics.median(column) for column in zip(*took[one.name], strict=True))
        print(f"| {one.name} | {whole * 1e3:.3f} ms | {fast / whole:.3f} | {first * 1e6:.0f} µs |", flush=True)


def measure(engines: Engines, memory: Sequence[RemoteMemory], ends: tuple[int, int], at: int, args: Any) -> bool:
    """Prints all tables of one device; whether every way was right."""
    device = GpuDevices(GpuCopy.KERNEL).find(memory[0 if at == ends[0] else 1].memory.bus_id)
    bad = check(device, engines, args.seed)
    bench = mapped(device, memory)
    plain = Plain(device._runtime, *ends, at)
    written = [one for one in KERNELS if one.name not in bad]
    brought = [one for one in paths(device, bench.bare) if one.name not in bad]
    for kib in _KIB:
        kernels(bench, plain, written, kib, args.repeats, args.seed)
        launches(bench, plain, brought, kib, args.repeats, args.seed)
    return not bad


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--across", action="store_true", help="from the first device to the second")
    args = parser.parse_args()
    ends = (0, 1) if args.across else (0, 0)
    right = []
    with Engines(*ends) as engines:
        memory = [engines.make([_LAYER] * _LAYERS, seed) for seed in (1, 2)]
        for at in dict.fromkeys(reversed(ends)):  # the destination's, as kvd does it, and then the source's
            print(f"\ndevice {at} copies from device {ends[0]} to device {ends[1]}", flush=True)
            with torch.cuda.device(at):
                right.append(measure(engines, memory, ends, at, args))
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
