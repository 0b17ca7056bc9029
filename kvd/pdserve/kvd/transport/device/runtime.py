"""The runtime library of CUDA or HIP through ctypes: the few calls that IPC and copies need.

HIP has the same calls under another prefix, with the same numbers. Both sides use this: the engine's
worker exports, kvd opens. Nothing here knows of kvd.
"""

import ctypes
from typing import Final

import numpy as np

from pdserve.kvd.plan import Offsets
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.types import MemoryKind

HANDLE_BYTES: Final = 64

_NOT_READY: Final = 600
_REACHED_ALREADY: Final = 704
_DEFAULT_KIND: Final = 4
_LAZY_PEER_ACCESS: Final = 1
_NON_BLOCKING: Final = 1
_BLOCKING_SYNC: Final = 1
_NO_TIMING: Final = 2
_INTERPROCESS: Final = 4
_IN_STREAM_ORDER: Final = 1
_OVERLAP_WITH_COMPUTE: Final = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)

    @classmethod
    def of(cls, handle: bytes) -> "_Handle":
        if len(handle) != HANDLE_BYTES:
            raise DeviceFailed(f"an IPC handle of {len(handle)} bytes; it has {HANDLE_BYTES}")
        return cls.from_buffer_copy(handle)


_VOID, _SIZE, _INT, _FLAGS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "SetDevice": (_INT,),
    "GetDeviceCount": (_VOID,),
    "DeviceEnablePeerAccess": (_INT, _FLAGS),
    "DeviceGetByPCIBusId": (_VOID, ctypes.c_char_p),
    "DeviceGetPCIBusId": (ctypes.c_char_p, _INT, _INT),
    "DeviceGetStreamPriorityRange": (_VOID, _VOID),
    "MemGetInfo": (_VOID, _VOID),
    "IpcGetMemHandle": (_VOID, _VOID),
    "IpcOpenMemHandle": (_VOID, _Handle, _FLAGS),
    "IpcCloseMemHandle": (_VOID,),
    "Malloc": (_VOID, _SIZE),
    "StreamCreateWithPriority": (_VOID, _FLAGS, _INT),
    "StreamWaitEvent": (_VOID, _VOID, _FLAGS),
    "EventCreateWithFlags": (_VOID, _FLAGS),
    "EventDestroy": (_VOID,),
    "EventQuery": (_VOID,),
    "EventRecord": (_VOID, _VOID),
    "EventSynchronize": (_VOID,),
    "IpcGetEventHandle": (_VOID, _VOID),
    "IpcOpenEventHandle": (_VOID, _Handle),
    "MemcpyAsync": (_VOID, _VOID, _SIZE, _INT, _VOID),
    "MemcpyBatchAsync": (_VOID, _VOID, _VOID, _SIZE, _VOID, _VOID, _SIZE, _VOID),
    "GetLastError": (),
}
"""Arguments of the calls, by their names behind the prefix: told once, so that a call costs a microsecond less."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = (("order", ctypes.c_int), ("src", _Location), ("dst", _Location), ("flags", ctypes.c_uint))


class Runtime:
    """One loaded library. Addresses, streams and events are plain integers. Every method raises DeviceFailed."""

    def __init__(self, kind: MemoryKind, version: str) -> None:
        """`version`: of CUDA ("13.0") or HIP, as the engine's framework was built for."""
        self.kind = kind
        major = version.split(".")[0]
        name, driver = (f"libcudart.so.{major}", "libcuda.so.1")
        self._prefix = "cuda"
        if kind is MemoryKind.ROCM:
            name = driver = f"libamdhip64.so.{major}"
            self._prefix = "hip"
        try:
            self._library, self._driver = ctypes.CDLL(name), ctypes.CDLL(driver)
        except OSError as error:
            raise DeviceFailed(f"{name} cannot be loaded: {error}") from error
        self._error = self._function(self._library, f"{self._prefix}GetErrorString")
        self._error.restype = ctypes.c_char_p
        self._calls: dict[str, ctypes._NamedFuncPointer] = {}
        self.batches: Final = kind is MemoryKind.CUDA and int(major) >= 13
        """Whether `copy_batch` is there, in the form that this file knows."""

    # -- devices ----------------------------------------------------------------------------

    def use(self, index: int) -> None:
        """The calling thread works on this device from now on."""
        self._call("SetDevice", index)

    def count(self) -> int:
        """Devices that this process sees."""
        count = ctypes.c_int()
        self._call("GetDeviceCount", ctypes.byref(count))
        return count.value

    def reach(self, other: int) -> None:
        """The thread's device reads and writes another one's memory from now on, without the host between them; safe
        twice. For measurements: what is opened by a handle is reached without it."""
        name = "DeviceEnablePeerAccess"
        code = self._code(name, other, 0)
        if code == _REACHED_ALREADY:
            self._forget_error()
        else:
            self._check(name, code)

    def index_of(self, bus_id: str) -> int:
        """The number that this process knows a device by."""
        index = ctypes.c_int()
        self._call("DeviceGetByPCIBusId", ctypes.byref(index), bus_id.encode())
        return index.value

    def bus_id(self, index: int) -> str:
        """The PCI bus id of a device."""
        text = ctypes.create_string_buffer(32)
        self._call("DeviceGetPCIBusId", text, len(text), index)
        return text.value.decode().lower()

    def free_memory(self) -> int:
        """Bytes that nobody uses on the thread's device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("MemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    # -- memory -----------------------------------------------------------------------------

    def range_of(self, address: int) -> tuple[int, int]:
        """Where the allocation around an address begins, and its bytes."""
        base, size = ctypes.c_void_p(), ctypes.c_size_t()
        name = "cuMemGetAddressRange_v2" if self.kind is MemoryKind.CUDA else "hipMemGetAddressRange"
        function = self._function(self._driver, name)
        code = function(ctypes.byref(base), ctypes.byref(size), ctypes.c_void_p(address))
        if code:
            raise DeviceFailed(f"{name}: {code}")
        return base.value or 0, size.value

    def export_memory(self, address: int) -> bytes:
        """The handle of the allocation around an address."""
        handle = _Handle()
        self._call("IpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open_memory(self, handle: bytes) -> int:
        """The allocation's address in this process."""
        address = ctypes.c_void_p()
        self._call("IpcOpenMemHandle", ctypes.byref(address), _Handle.of(handle), _LAZY_PEER_ACCESS)
        return address.value or 0

    def close_memory(self, address: int) -> None:
        """Unmaps what `open_memory` gave."""
        self._call("IpcCloseMemHandle", address)

    def allocate(self, nbytes: int) -> int:
        """Memory of one's own; for tests and measurements."""
        address = ctypes.c_void_p()
        self._call("Malloc", ctypes.byref(address), nbytes)
        return address.value or 0

    # -- streams and events -----------------------------------------------------------------

    def make_stream(self) -> int:
        """A stream that gives way to every other one of its process."""
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._call("DeviceGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self._call("StreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, least)
        return stream.value or 0

    def make_event(self, *, shared: bool) -> int:
        """An event; `shared`: with other processes."""
        event = ctypes.c_void_p()
        flags = _NO_TIMING | (_INTERPROCESS if shared else _BLOCKING_SYNC)
        self._call("EventCreateWithFlags", ctypes.byref(event), flags)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Of one's own, or an opened one."""
        self._call("EventDestroy", event)

    def export_event(self, event: int) -> bytes:
        """The handle of a shared event."""
        handle = _Handle()
        self._call("IpcGetEventHandle", ctypes.byref(handle), event)
        return bytes(handle)

    def open_event(self, handle: bytes) -> int:
        """Another process' event."""
        event = ctypes.c_void_p()
        self._call("IpcOpenEventHandle", ctypes.byref(event), _Handle.of(handle))
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        """Sets the mark behind what the stream has been given."""
        self._call("EventRecord", event, stream)

    def follow(self, stream: int, event: int) -> None:
        """What the stream is given from now on begins behind the mark as it is set now."""
        self._call("StreamWaitEvent", stream, event, 0)

    def passed(self, event: int) -> bool:
        """Whether the mark is passed; never blocks."""
        code = self._code("EventQuery", event)
        if code == _NOT_READY:
            return False
        self._check("EventQuery", code)
        return True

    def wait(self, event: int) -> None:
        """Returns once the mark is passed; the thread sleeps meanwhile."""
        self._call("EventSynchronize", event)

    # -- copies -----------------------------------------------------------------------------

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """One copy in stream order."""
        self._call("MemcpyAsync", dst, src, nbytes, _DEFAULT_KIND, stream)

    def copy_batch(self, dst: Offsets, src: Offsets, length: Offsets, stream: int) -> None:
        """Many copies in one call, asked to leave the multiprocessors alone; needs `batches`."""
        columns = [np.ascontiguousarray(column, np.uint64) for column in (dst, src, length)]
        attributes, first = _Attributes(order=_IN_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE), ctypes.c_size_t(0)
        self._call(
            "MemcpyBatchAsync",
            *(column.ctypes.data for column in columns),
            len(length),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            stream,
        )

    def _function(self, library: ctypes.CDLL, name: str) -> "ctypes._NamedFuncPointer":
        try:
            function: ctypes._NamedFuncPointer = getattr(library, name)
        except AttributeError as error:
            raise DeviceFailed(f"the runtime has no {name}") from error
        return function

    def _call(self, name: str, *args: object) -> None:
        self._check(name, self._code(name, *args))

    def _code(self, name: str, *args: object) -> int:
        function = self._calls.get(name)
        if function is None:
            function = self._calls[name] = self._function(self._library, self._prefix + name)
            function.argtypes = _TYPES[name]
        code: int = function(*args)
        return code

    def _check(self, name: str, code: int) -> None:
        if code:
            text = self._error(code)
            self._forget_error()
            raise DeviceFailed(f"{self._prefix}{name}: {text.decode() if text else code}")

    def _forget_error(self) -> None:
        """A code stays "the last error" of the thread otherwise, and torch would find it."""
        self._code("GetLastError")
