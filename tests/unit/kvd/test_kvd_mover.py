"""The ways to copy runs inside an arena: each is held to the same claims."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.kvd.testing import running_kvd
from pdserve.kvd.transport import mover as movers
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.mover import LIBRARY, SOURCE, CompiledMover, MakeMover, PythonMover, Stop, load
from pdserve.rpc.channel import aio_channel

MIB = 1 << 20
SIZE = 4 * MIB
"""Of each of the two regions."""
CC = shutil.which("cc")


def compiled(to: Path, *flags: str, of: str = "") -> Path:
    """Compiles copy.c as strictly as the compiler can; `of` stands for another source's digest."""
    if CC is None:
        pytest.skip("no C compiler is here")
    digest = of or hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    strict = ("-std=c11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
    command = [CC, *strict, *flags, f'-DPDSERVE_COPY_SOURCE="{digest}"', "-o", str(to), str(SOURCE)]
    made = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert made.returncode == 0, made.stderr
    return to


def installed() -> ctypes.CDLL:
    """The library beside copy.c; only where nothing could compile it may it be missing."""
    if CC is None and not LIBRARY.exists():
        pytest.skip("no C compiler is here, hence no compiled copy loop")
    return load()


@functools.cache
def noise(seed: int) -> bytes:
    """Bytes for a region, none of them 0."""
    return np.random.default_rng(seed).integers(1, 256, SIZE, dtype=np.uint8).tobytes()


@pytest.fixture(params=["installed", "without streamed stores", "python"], scope="module")
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeMover:
    """Each mover in turn: as it is installed, as other processors get it, and what is left without a compiler."""
    if request.param == "python":
        return lambda mapping, base: PythonMover(mapping, base, "a test")
    if request.param == "installed":
        library = installed()
    else:
        library = load(compiled(tmp_path_factory.mktemp("built") / "libcopy.so", "-U__SSE2__"))
    return lambda _, base: CompiledMover(base, library)


@pytest.fixture
def arena(make: MakeMover) -> Iterator[Arena]:
    """64 MiB of addresses, and one of the movers."""
    made = Arena([64 * MIB], make)
    yield made
    made.close()


def offsets(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """As the arena takes them."""
    return np.array(values, np.uint64)


def region(arena: Arena, seed: int | None = None) -> int:
    """The offset of a new region, of zeros or of noise."""
    fd = os.memfd_create("mover")
    try:
        os.ftruncate(fd, SIZE)
        if seed is not None:
            os.pwrite(fd, noise(seed), 0)
        return arena.map(fd, SIZE)
    finally:
        os.close(fd)


def content(arena: Arena, at: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """A copy of a region's bytes."""
    view = arena.view(at, SIZE)
    try:
        return np.frombuffer(bytes(view), np.uint8)
    finally:
        view.release()


@pytest.mark.parametrize("seed", range(6))
def test_random_runs_arrive_and_nothing_else_changes(arena: Arena, seed: int) -> None:
    """Runs of 1 byte to 100 KiB at any alignment: the destination is as a plain copy makes it, to the byte."""
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    src, dst = region(arena, seed), region(arena, seed + 100)
    source, expected = content(arena, src), content(arena, dst).copy()
    lengths = random.integers(1, random.choice([64, 9000, 100 << 10]), 40)
    order = random.permutation(40)
    at = np.cumsum(lengths) - lengths + random.integers(0, 4096)
    to = np.empty_like(at)
    to[order] = np.cumsum(lengths[order]) - lengths[order] + random.integers(0, 4096)
    runs = [run for run in zip(at.tolist(), to.tolist(), lengths.tolist(), strict=True) if random.random() < 0.8]
    for a, b, count in runs:
        expected[b : b + count] = source[a : a + count]
    ats, tos, counts = (offsets(*column) for column in zip(*runs, strict=True))
    moved = arena.move(tos + np.uint64(dst), ats + np.uint64(src), counts)
    assert moved == sum(count for _, _, count in runs)
    assert (content(arena, dst) == expected).all()
    assert (content(arena, src) == source).all()


@pytest.mark.parametrize("length", [1, 63, 64, 8191, 8192, 8193, 8256, MIB - 1, MIB, MIB + 1, 3 * MIB + 4321])
def test_every_edge_of_a_run_is_copied(arena: Arena, length: int) -> None:
    """Around a line, two pages and a batch, with source and destination 0, 1 and 63 bytes off a line."""
    src, source = region(arena, 1), np.frombuffer(noise(1), np.uint8)
    for off_src, off_dst in ((0, 0), (1, 0), (0, 1), (63, 1), (1, 63)):
        dst, expected = region(arena, 2), np.frombuffer(noise(2), np.uint8).copy()
        expected[off_dst : off_dst + length] = source[off_src : off_src + length]
        assert arena.move(offsets(dst + off_dst), offsets(src + off_src), offsets(length)) == length
        assert (content(arena, dst) == expected).all()
        arena.unmap(dst)


def test_nothing_is_moved_by_an_empty_list(arena: Arena) -> None:
    """No runs, and runs of no bytes."""
    src, dst = region(arena, 1), region(arena)
    assert arena.move(offsets(), offsets(), offsets()) == 0
    assert arena.move(offsets(dst, dst + 1), offsets(src, src), offsets(0, 0)) == 0
    assert not content(arena, dst).any()


def test_a_copy_that_is_stopped_before_it_begins_moves_nothing(arena: Arena) -> None:
    """The flag is looked at before the first byte."""
    src, dst = region(arena, 1), region(arena)
    stop = Stop()
    stop.set()
    assert stop.is_set()
    assert arena.move(offsets(dst), offsets(src), offsets(100), stop) == 0
    assert not content(arena, dst).any()


@pytest.mark.parametrize("block", [16 << 10, 64 << 10, MIB, 3 * MIB])
def test_a_copy_can_be_stopped_between_batches(arena: Arena, block: int) -> None:
    """The flag lies in the first block, so the copy sets it itself: exactly one batch of 1 MiB is moved."""
    src, dst = region(arena, 1), region(arena)
    source = content(arena, src)
    view = arena.view(dst, 4)
    stop = Stop(ctypes.c_int32.from_buffer(view))
    begins = np.arange(0, 3 * MIB, block, dtype=np.uint64)
    moved = arena.move(begins + np.uint64(dst), begins + np.uint64(src), np.full(len(begins), block, np.uint64), stop)
    del stop
    view.release()
    assert moved == MIB
    after = content(arena, dst)
    assert (after[:MIB] == source[:MIB]).all()
    assert not after[MIB:].any()


def test_others_go_on_while_it_copies_and_may_stop_it(arena: Arena) -> None:
    """Another thread sees the first bytes arrive and stops the copy, far before its end."""
    src, dst = region(arena, 1), region(arena)
    runs = (32 << 30) // MIB
    columns = (np.full(runs, dst, np.uint64), np.full(runs, src, np.uint64), np.full(runs, MIB, np.uint64))
    stop = Stop()
    moved: list[int] = []
    thread = threading.Thread(target=lambda: moved.append(arena.move(*columns, stop)))
    view = arena.view(dst, SIZE)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not view[0]:
            assert time.monotonic() < deadline
    finally:
        stop.set()
        thread.join(20)
        view.release()
    assert 0 < moved[0] < runs * MIB


def test_the_library_in_use_is_that_of_the_source_in_the_tree(tmp_path: Path) -> None:
    """It says which copy.c it was built from; one of another copy.c, or no library, is not used."""
    assert installed().pdserve_copy_source() == hashlib.sha256(SOURCE.read_bytes()).hexdigest().encode()
    arena = Arena([MIB])
    assert (arena.mover.name, arena.mover.slow_because) == ("compiled", "")
    arena.close()
    with pytest.raises(ImportError, match=r"another copy\.c"):
        load(compiled(tmp_path / "old.so", of="0" * 64))
    no_library = tmp_path / "noise.so"
    no_library.write_bytes(b"not a library")
    for missing in (no_library, tmp_path / "none.so"):
        with pytest.raises(ImportError, match="C compiler"):
            load(missing)
    changed = tmp_path / "copy.c"
    changed.write_bytes(SOURCE.read_bytes() + b"\n")
    with pytest.raises(ImportError, match="install pdserve again"):
        load(source=changed)


@pytest.mark.parametrize("flags", [(), ("-U__SSE2__",)])
def test_the_source_compiles_without_a_warning(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Also for processors that have no streamed stores."""
    compiled(tmp_path / "libcopy.so", *flags)


async def test_a_daemon_that_copies_slowly_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the compiled loop kvd warns once at start, with the reason, and operators see it."""
    monkeypatch.setattr(movers, "LIBRARY", tmp_path / "none.so")
    with capture_logs() as logs:
        async with running_kvd() as kvd, aio_channel(f"unix:{kvd.socket}") as channel:
            seen = await kvd_pb2_grpc.OperatorStub(channel).Describe(kvd_pb2.DescribeRequest())
    assert seen.copier == "python"
    (warned,) = [entry for entry in logs if entry["event"] == "kvd_copies_slowly"]
    assert (warned["log_level"], warned["copier"]) == ("warning", "python")
    assert "none.so" in warned["because"]
    (ready,) = [entry for entry in logs if entry["event"] == "kvd_ready"]
    assert ready["copier"] == "python"


async def test_a_daemon_with_the_compiled_loop_does_not_warn() -> None:
    """Then its start and Describe name it."""
    installed()
    with capture_logs() as logs:
        async with running_kvd() as kvd, aio_channel(f"unix:{kvd.socket}") as channel:
            seen = await kvd_pb2_grpc.OperatorStub(channel).Describe(kvd_pb2.DescribeRequest())
    assert seen.copier == "compiled"
    assert [entry["event"] for entry in logs if entry["event"] == "kvd_copies_slowly"] == []
