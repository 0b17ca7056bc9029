"""A report as kvd.proto has it."""

from collections.abc import Mapping
from typing import Final, Literal

from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.kvd.probing.exposure import complaint
from pdserve.kvd.probing.values import Candidate, Device, Listener, Report, Way
from pdserve.kvd.probing.verdict import names, nominal, warnings

_KINDS: Final[Mapping[str, Literal["net", "rdma", "gpu", "xgmi"]]] = {
    "net": "net",
    "rdma": "rdma",
    "gpu": "gpu",
    "xgmi": "xgmi",
}


def encode_device(device: Device) -> kvd_pb2.Device:
    """One device."""
    return kvd_pb2.Device(name=device.name, kind=device.kind, bits_per_second=device.bits_per_second, up=device.up)


def decode_device(wire: kvd_pb2.Device) -> Device:
    """One device, of another daemon."""
    return Device(wire.name, _KINDS.get(wire.kind, "net"), wire.bits_per_second, wire.up)


def encode(report: Report) -> kvd_pb2.MeasureResponse:
    """All of it, with what is to be said of it."""
    return kvd_pb2.MeasureResponse(
        ways=[_way(way, report) for way in report.ways],
        devices=[encode_device(device) for device in report.devices],
        scratch_bytes=report.scratch_bytes,
        seconds=report.seconds,
        listeners=[_listener(one) for one in report.listeners],
    )


def _way(way: Way, report: Report) -> kvd_pb2.Way:
    source, target = way.devices or ("", "")
    return kvd_pb2.Way(
        peer=way.peer,
        node=way.node,
        kvd_epoch=way.epoch,
        kind=way.kind.value,
        candidates=[_candidate(one, way, report) for one in way.candidates],
        error=way.error,
        reason=way.reason,
        warnings=warnings(way, report.devices, report.links),
        from_device=source,
        to_device=target,
        not_measured=way.not_measured,
    )


def _candidate(one: Candidate, way: Way, report: Report) -> kvd_pb2.Candidate:
    measured = one.measured
    return kvd_pb2.Candidate(
        transport=one.transport,
        used=one.used,
        why_not=one.why_not,
        lanes=measured.lanes,
        names=names(one),
        error=measured.error,
        latency_seconds=measured.latency,
        speeds=[kvd_pb2.Speed(block_bytes=s.block_bytes, bytes=s.nbytes, seconds=s.seconds) for s in measured.speeds],
        nominal_bytes_per_second=nominal(one, report.devices, way.devices, report.links),
        link=one.link,
    )


def _listener(one: Listener) -> kvd_pb2.Listener:
    return kvd_pb2.Listener(
        transport=one.transport,
        pid=one.pid,
        address=one.address,
        port=one.port,
        exposure=one.exposure.value,
        error=complaint(one),
    )
